//! The control socket of a guest that runs: what a stock kernel sees of a resize, and what KVM does
//! after a change of its parameters.

use std::fs::File;
use std::path::Path;

use pollux_tests::Guest;
use pollux_tests::ctl::Control;
use pollux_tests::guest::{Running, scratch};
use serde_json::Value as Json;

use super::failing::{Loop, host};
use super::{DATA_BYTES, guest, host_parameters, new_disk, start};

fn controlled(guest: Guest) -> (Guest, Control) {
    let control = Control(guest.dir().join("control"));
    (guest.args([Path::new("--control"), &control.0]), control)
}

#[test]
fn a_running_guest_sees_its_disks_grow_and_shrink() {
    for mode in ["kernel", "user"] {
        let (guest, control) = controlled(guest("vmlinuz", "6.12"));
        let dir = scratch();
        let backing = new_disk(dir.path());
        let device = Loop::new(&backing);
        let backing = File::options().write(true).open(&backing).expect("the loop's file");
        let data = new_disk(guest.dir());
        let file = File::options().write(true).open(&data).expect("the disk's file");
        let disks = [data.to_str().expect("a plain path"), &device.0];
        let disks = disks.map(|path| format!("path={path}"));
        // When both have another size: their sizes, and whether the last block of each can be read.
        let step = |from: u64, name: &str| {
            let last = "$(($(cat /sys/block/$d/size) / 8 - 1))";
            format!(
                "for d in vdb vdc; do while [ $(cat /sys/block/$d/size) = {from} ]; do sleep 0.1; done; \
                 dd if=/dev/$d of=/dev/null bs=4k count=1 iflag=direct skip={last} || echo unreadable; \
                 echo {name} $d $(cat /sys/block/$d/size); done; "
            )
        };
        let sectors = DATA_BYTES / 512;
        let command = format!(
            "echo up; {}{}dmesg | grep 'detected capacity change'",
            step(sectors, "grown"),
            step(2 * sectors, "shrunk")
        );
        let guest = guest.args(["--halt", mode, "--disk", &disks[0], "--disk", &disks[1]]);
        let mut guest = start(guest, &command);
        guest.wait_for("the guest", |guest| guest.results().contains("up"));
        for (bytes, name) in [(2 * DATA_BYTES, "grown"), (DATA_BYTES / 2, "shrunk")] {
            file.set_len(bytes).expect("another size");
            backing.set_len(bytes).expect("another size");
            host("losetup", &["--set-capacity", &device.0]);
            for disk in ["blk1", "blk2"] {
                let reply = control.ctl(&format!("resize {disk}")).done();
                assert_eq!(reply["new_capacity_bytes"], bytes, "{mode} {disk}");
            }
            guest.wait_for(name, |guest| guest.results().contains(&format!("{name} vdc")));
        }
        let end = guest.wait();
        end.expect(0);
        for line in [
            format!("grown vdb {}", 2 * sectors),
            format!("grown vdc {}", 2 * sectors),
            format!("shrunk vdb {}", sectors / 2),
            format!("shrunk vdc {}", sectors / 2),
            format!("vdb: detected capacity change from {sectors} to {}", 2 * sectors),
            format!("vdc: detected capacity change from {} to {}", 2 * sectors, sectors / 2),
        ] {
            assert!(end.results.contains(&line), "{mode}: {line} not in: {}", end.results);
        }
        let unreadable = end.results.lines().any(|line| line == "unreadable");
        assert!(!unreadable, "{mode}: {}", end.results);
        assert_eq!(file.metadata().expect("the disk").len(), DATA_BYTES / 2, "nobody else's");
    }
}

#[test]
fn set_changes_what_kvm_does_and_the_hosts_parameters_come_back() {
    let before = host_parameters();
    let (guest, control) = controlled(guest("vmlinuz", "6.12"));
    let options = ["--halt-poll-ns", "0", "--guest-idle", "halt", "--allow-host-tuning"];
    let mut guest = start(guest.args(options), "echo up; while true; do sleep 0.02; done");
    guest.wait_for("the guest", |guest| guest.results().contains("up"));
    let halt = |stats: &Json, name: &str| stats["vcpus"][0]["halt"][name].as_u64().expect("halts");
    let when = |guest: &mut Running, what: &str, seen: &dyn Fn(&Json) -> bool| {
        guest.wait_for(what, |_| seen(&control.stats()));
        control.stats()
    };
    let wakes = |stats: &Json| halt(stats, "halt_wakeup") + halt(stats, "halt_successful_poll");

    let first = when(&mut guest, "halts", &|stats| wakes(stats) > 50);
    assert_eq!(halt(&first, "halt_attempted_poll"), 0, "{first:#}");
    control.ctl("set halt_poll_ns=1s").done();
    let polled = when(&mut guest, "polls", &|stats| halt(stats, "halt_successful_poll") > 5);
    assert_eq!(polled["config"]["halt_poll_ns"], 1_000_000_000);
    control.ctl("set halt_poll_ns=0").done();
    let enough = wakes(&control.stats()) + 20;
    let off = when(&mut guest, "halts", &|stats| wakes(stats) > enough);
    let enough = wakes(&off) + 50;
    let later = when(&mut guest, "halts", &|stats| wakes(stats) > enough);
    assert_eq!(halt(&later, "halt_attempted_poll"), halt(&off, "halt_attempted_poll"));

    // The others are the host's: in force at once, and put back.
    for value in ["7", "9"] {
        control.ctl(&format!("set halt_poll_ns_grow={value}")).done();
        let now = host_parameters();
        let grow = now.iter().find(|(name, _, _)| *name == "grow").expect("it is one of them");
        assert_eq!(grow.2, value);
        let host = &control.stats()["host"]["kvm_parameters"];
        assert_eq!(host["halt_poll_ns_grow"].to_string(), value);
    }
    control.ctl("stop").done();
    let end = guest.wait();
    end.expect(0);
    assert_eq!(end.stats["config"]["halt_poll_ns_grow"], 9);
    assert_eq!(host_parameters(), before);
}
