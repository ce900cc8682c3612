//! Packed virtqueues with the driver of a stock guest.

use std::fs;

use pollux_tests::verify;

use super::failing::host;
use super::{guest, new_file, start};

/// Bytes of the disk: fio's files, and what ext4 takes for itself.
const EXT4_BYTES: u64 = 112 << 20;

/// The guest mounts ext4 on a packed disk, and fio writes, reads and checks a file there; the host
/// checks the file system, and the file in it.
fn verifies_a_file_on_ext4(release: &str, event_idx: bool, block_bytes: u32, options: &[&str]) {
    let guest = guest("vmlinuz", release).args(options);
    let disk = new_file(guest.dir(), "ext4", EXT4_BYTES);
    let written = guest.dir().join("written");
    let path = disk.to_str().expect("a plain path");
    host("mke2fs", &["-q", "-t", "ext4", "-b", "4096", path]);
    let event_idx_option = if event_idx { "on" } else { "off" };
    let spec = format!(
        "path={path},queues=2,packed=on,event-idx={event_idx_option},block-size={block_bytes}"
    );
    let command = "set -e; echo bits $(cut -c30,35,41 /sys/block/vdb/device/features); \
         echo split $(cut -c35 /sys/block/vda/device/features); \
         echo blocks of $(cat /sys/block/vdb/queue/logical_block_size); \
         mkdir /tmp/ext4; mount -t ext4 /dev/vdb /tmp/ext4; fio-verify /tmp/ext4/written 1; \
         umount /tmp/ext4";
    let mut running = start(guest.args(["--cpus", "2", "--disk", &spec]), command);
    running.wait_for("the end of fio", |guest| guest.results().contains("@exit"));
    // The run's directory goes with the outcome: look at the disk before.
    let results = running.results();
    assert!(results.contains("@verify ok"), "{results}");
    // EVENT_IDX, RING_PACKED and RING_RESET were negotiated, the last two for this disk.
    let bits = format!("bits {}11", u8::from(event_idx));
    assert!(results.lines().any(|line| line == bits), "{bits}: {results}");
    assert!(results.lines().any(|line| line == "split 0"), "{results}");
    let blocks = format!("blocks of {block_bytes}");
    assert!(results.lines().any(|line| line == blocks), "{blocks}: {results}");
    host("e2fsck", &["-f", "-n", path]);
    host("debugfs", &["-R", &format!("dump /written {}", written.display()), path]);
    let blocks = verify::blocks(&fs::read(&written).expect("the file in it"));
    assert!(blocks.expect("what the guest checked is in the file") > 1000);

    let end = running.wait();
    end.expect(0);
    let figures = end.stats["queues"].as_array().expect("queues");
    let requests: u64 = figures.iter().filter_map(|queue| queue["requests"].as_u64()).sum();
    assert!(requests > 1000, "{:#}", end.stats["queues"]);
}

#[test]
fn packed_ext4_verifies() {
    verifies_a_file_on_ext4("6.12", true, 512, &[]);
}

#[test]
fn packed_ext4_verifies_without_event_idx_and_with_blocks_of_4096_bytes() {
    verifies_a_file_on_ext4("6.12", false, 4096, &[]);
}

#[test]
fn packed_ext4_verifies_with_6_1_and_the_user_apic() {
    verifies_a_file_on_ext4("6.1", true, 512, &["--halt", "user"]);
}
