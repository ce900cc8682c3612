//! Disks, in both halt modes: fio writes, reads and checks in the guest, then the host checks what is
//! in the file.

use std::fs::File;

use pollux_tests::verify::blocks;

use super::{DATA_BYTES, guest, new_file, read_all, start};

/// A guest with a disk for each element of `disks` (their options) writes and reads them with fio,
/// one after the other. `direct`: it bypasses its own page cache.
fn verifies(halt: &str, disks: &[String], direct: bool) {
    let mut guest = guest("vmlinuz", "6.12").args(["--cpus", "2", "--halt", halt]);
    let direct = u8::from(direct);
    let mut files = Vec::new();
    let mut command = String::from("true");
    for (disk, letter) in disks.iter().zip('b'..) {
        let data = new_file(guest.dir(), &format!("data-{letter}"), DATA_BYTES);
        guest = guest.args(["--disk", &format!("path={},{disk}", data.display())]);
        command += &format!(" && fio-verify /dev/vd{letter} {direct}");
        files.push(data);
    }
    // The run's directory goes with the outcome: look at the disks before.
    let mut running = start(guest, &command);
    running.wait_for("the end of fio", |guest| guest.results().contains("@exit"));
    let results = running.results();
    let copies = files.iter().map(|data| File::open(data).expect("the disk's file"));
    let copies: Vec<_> = copies.collect();
    running.wait().expect(0);
    assert_eq!(results.matches("@verify ok").count(), disks.len(), "{disks:?}: {results}");
    for (copy, disk) in copies.into_iter().zip(disks) {
        let found = blocks(&read_all(copy)).expect("what the guest checked is in the file");
        assert!(found > 1000, "fio wrote only {found} blocks of {disk}");
    }
}

/// With and without EVENT_IDX.
fn verifies_both(halt: &str, disk_options: &str) {
    let both = ["on", "off"].map(|on| format!("queues=2,{disk_options},event-idx={on}"));
    verifies(halt, &both, true);
}

/// The same tests for a halt mode.
macro_rules! verify {
    ($halt:ident) => {
        mod $halt {
            use super::{verifies, verifies_both};

            const HALT: &str = stringify!($halt);

            #[test]
            fn uring() {
                verifies_both(HALT, "engine=uring,direct=off");
            }

            #[test]
            fn uring_direct() {
                verifies_both(HALT, "engine=uring,direct=on");
            }

            #[test]
            fn sync() {
                verifies_both(HALT, "engine=sync,direct=off");
            }

            #[test]
            fn sync_direct() {
                verifies_both(HALT, "engine=sync,direct=on");
            }

            #[test]
            fn through_the_guests_page_cache() {
                verifies(HALT, &["queues=1,engine=uring".into()], false);
            }
        }
    };
}

verify!(kernel);
verify!(user);
