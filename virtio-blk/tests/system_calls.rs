//! How many system calls a request costs its worker, at queue depth 1. A child process plays guest
//! and device; this one traces the worker.

mod rig;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rig::*;
use virtio_blk::{BlkConfig, EngineKind};

const REQUESTS: usize = 200;
const DIR: &str = "POLLUX_TEST_DIR";
const DIRECT: &str = "POLLUX_TEST_DIRECT";

/// Not a test by itself: the traced process. Without the environment it has nothing to do.
#[test]
fn traced_process() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let direct = std::env::var_os(DIRECT).is_some();
    let config = BlkConfig { engine: EngineKind::Uring, direct, ..BlkConfig::default() };
    let mut rig = Rig::new(Path::new(&dir), 64, config);
    // A page of its own, which O_DIRECT takes as it is.
    let into = rig.arena.alloc_at(4096, 4096, 0);
    let (parts, _, _) = rig.parts(IN, 8, &[], 0);
    let bufs = [parts[0], devices::testkit::Buf::writable(into, 4096), parts[1]];
    rig.send(&bufs);
    println!("\nworker {}", rig.block.worker_tids()[0]);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let sleeps = rig.block.counters()[0].clone();
    for _ in 0..REQUESTS {
        // The worker is asleep, or on its way.
        let slept = sleeps.sleeps.get();
        rig.send(&bufs);
        while sleeps.sleeps.get() == slept {
            std::thread::yield_now();
        }
    }
    std::process::exit(0);
}

fn ptrace(request: libc::c_uint, tid: i32, data: usize) {
    // SAFETY: none of the requests used here writes to this process, but PTRACE_GETREGS, to whose
    // buffer `data` points.
    let result = unsafe { libc::ptrace(request, tid, 0usize, data) };
    assert_eq!(result, 0, "ptrace: {}", std::io::Error::last_os_error());
}

fn wait(tid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the status outlives the call.
    let waited = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) };
    assert_eq!(waited, tid, "waitpid: {}", std::io::Error::last_os_error());
    status
}

/// The system calls of thread `tid` from now to its end, by number. `start` is called once they
/// are being counted.
fn count(tid: i32, start: impl FnOnce()) -> BTreeMap<u64, usize> {
    let mut calls = BTreeMap::new();
    ptrace(libc::PTRACE_SEIZE, tid, libc::PTRACE_O_TRACESYSGOOD as usize);
    ptrace(libc::PTRACE_INTERRUPT, tid, 0);
    wait(tid);
    ptrace(libc::PTRACE_SYSCALL, tid, 0);
    start();
    let mut entering = true;
    loop {
        let status = wait(tid);
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            return calls;
        }
        if libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80 {
            if entering {
                // SAFETY: all-zero is a valid set of registers.
                let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
                ptrace(libc::PTRACE_GETREGS, tid, (&raw mut registers).addr());
                *calls.entry(registers.orig_rax).or_default() += 1;
            }
            entering = !entering;
        }
        // SAFETY: takes no pointers. It fails where the thread has just ended, which `wait` sees.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, tid, 0usize, 0usize) };
    }
}

/// The worker's calls for [`REQUESTS`] reads.
fn traced(dir: &Path, direct: bool) -> BTreeMap<u64, usize> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "traced_process", "--nocapture"]).env(DIR, dir);
    if direct {
        command.env(DIRECT, "1");
    }
    let mut child: Child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let tid = lines
        .map(Result::unwrap)
        .find_map(|line| line.strip_prefix("worker ").map(|tid| tid.parse().unwrap()))
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let calls = count(tid, || stdin.write_all(b"go\n").unwrap());
    assert!(child.wait().unwrap().success());
    calls
}

fn of(calls: &BTreeMap<u64, usize>, call: libc::c_long) -> usize {
    calls.get(&(call as u64)).copied().unwrap_or(0)
}

/// All but what the recording sink of the tests may do in place of the write to an irqfd.
fn total(calls: &BTreeMap<u64, usize>) -> usize {
    calls.values().sum::<usize>() - of(calls, libc::SYS_futex)
}

/// Calls beside those of the requests: the start and the end of the trace, a buffer that grows.
const SLACK: usize = 10;

#[test]
fn a_read_from_memory_costs_a_sleep_and_a_read() {
    for dir in [on_disk(), on_tmpfs()] {
        let calls = traced(dir, false);
        assert_eq!(of(&calls, libc::SYS_preadv2), REQUESTS, "{dir:?} {calls:?}");
        assert!(of(&calls, libc::SYS_read) >= REQUESTS - 1, "{dir:?} {calls:?}");
        assert!(total(&calls) <= 2 * REQUESTS + SLACK, "{dir:?} {calls:?}");
    }
}

#[test]
fn a_read_from_the_disk_costs_two_trips_into_the_ring() {
    let calls = traced(on_disk(), true);
    assert!(of(&calls, libc::SYS_io_uring_enter) > REQUESTS, "{calls:?}");
    assert!(total(&calls) <= 2 * REQUESTS + SLACK, "{calls:?}");
}
