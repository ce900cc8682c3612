//! What each feature of io_uring is worth to the engine: random 4 KiB reads of a file on a disk, with
//! `O_DIRECT`, in the way in which the engine uses its ring (a batch of submissions, one
//! `io_uring_enter`, completions taken until there are none), with features left out or added one by one.
//!
//!     cargo bench -p virtio-blk --bench uring [-- DIRECTORY]
//!
//! All variants in turn, round after round; the engine's own is there twice, so that one sees how much
//! equal variants differ. Times are of this thread on a CPU: how fast the disk is does not matter much.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::mem;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use vmm_sys_util::eventfd::EventFd;

const FILE_BYTES: u64 = 64 << 20;
const BLOCK: usize = 4096;
const ROUNDS: usize = 9;
const TIME: Duration = Duration::from_millis(250);
const DEPTHS: [usize; 3] = [1, 8, 32];

/// One variant of the ring.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    tasks: Tasks,
    fixed_file: bool,
    fixed_buffers: bool,
    /// One `io_uring_enter` for all that is to be submitted, or one each.
    batch: bool,
    /// One read of an eventfd is always in flight, as that of the kick is.
    kick: bool,
}

/// When the kernel does the work of a completion.
#[derive(Clone, Copy)]
enum Tasks {
    /// At once: the thread is interrupted for it.
    Interrupt,
    /// When the thread is next in the kernel (`COOP_TASKRUN`).
    Cooperative,
    /// When the thread asks for completions (`SINGLE_ISSUER`, `DEFER_TASKRUN`).
    Deferred,
    /// As `Interrupt`, but the kernel knows that one thread submits (`SINGLE_ISSUER`).
    SingleIssuer,
}

const ENGINE: Variant = Variant {
    name: "the engine's",
    tasks: Tasks::Interrupt,
    fixed_file: false,
    fixed_buffers: false,
    batch: true,
    kick: true,
};

const VARIANTS: [Variant; 8] = [
    ENGINE,
    Variant { name: "with a registered file", fixed_file: true, ..ENGINE },
    Variant {
        name: "with registered file and buffers",
        fixed_file: true,
        fixed_buffers: true,
        ..ENGINE
    },
    Variant { name: "with COOP_TASKRUN", tasks: Tasks::Cooperative, ..ENGINE },
    Variant { name: "with SINGLE_ISSUER", tasks: Tasks::SingleIssuer, ..ENGINE },
    Variant { name: "with SINGLE_ISSUER, DEFER_TASKRUN", tasks: Tasks::Deferred, ..ENGINE },
    Variant { name: "an enter for each submission", batch: false, ..ENGINE },
    Variant { name: "the engine's, again", ..ENGINE },
];

/// What a variant came to in one round, a request.
#[derive(Clone, Copy)]
struct Measured {
    cpu_ns: f64,
    wall_ns: f64,
    enters: f64,
}

fn main() -> io::Result<()> {
    let directory =
        std::env::args_os().skip(1).find(|word| !word.to_string_lossy().starts_with('-'));
    let directory = directory.map_or_else(|| PathBuf::from("."), PathBuf::from);
    let path = directory.join("uring-bench");
    let result = file(&path).and_then(|file| measure(&file));
    let _ = std::fs::remove_file(&path);
    result
}

/// A file whose blocks are all there.
fn file(path: &PathBuf) -> io::Result<File> {
    let mut file = File::create(path)?;
    let block = vec![0x5a; 1 << 20];
    for _ in 0..FILE_BYTES >> 20 {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

fn measure(file: &File) -> io::Result<()> {
    println!(
        "Of {ROUNDS} rounds of {} ms a variant: median, least and greatest, a request",
        TIME.as_millis()
    );
    for depth in DEPTHS {
        println!("\ndepth {depth:<32}        CPU ns                 ns    enters");
        let mut all: Vec<Vec<Measured>> = vec![Vec::new(); VARIANTS.len()];
        for _ in 0..ROUNDS {
            for (variant, measured) in VARIANTS.iter().zip(&mut all) {
                measured.push(run(file, *variant, depth)?);
            }
        }
        for (variant, measured) in VARIANTS.iter().zip(&all) {
            let spread = |of: fn(&Measured) -> f64| {
                let mut values: Vec<f64> = measured.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                [values[values.len() / 2], values[0], values[values.len() - 1]]
            };
            let [cpu, least, most] = spread(|measured| measured.cpu_ns);
            let [wall, ..] = spread(|measured| measured.wall_ns);
            let [enters, ..] = spread(|measured| measured.enters);
            println!(
                "  {:<38} {cpu:>6.0} ({least:>5.0} - {most:>5.0}) {wall:>8.0}    {enters:>5.2}",
                variant.name
            );
        }
    }
    Ok(())
}

/// Memory for the data of all requests, aligned for `O_DIRECT`.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

fn run(file: &File, variant: Variant, depth: usize) -> io::Result<Measured> {
    // Before the ring, so that they go after it.
    let mut blocks: Vec<Block> = (0..depth).map(|_| Block([0; BLOCK])).collect();
    let mut kicks = 0u64;
    let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
    builder.dontfork().setup_clamp().setup_cqsize(2 * depth as u32 + 2);
    match variant.tasks {
        Tasks::Interrupt => &mut builder,
        Tasks::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag(),
        Tasks::Deferred => builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
        Tasks::SingleIssuer => builder.setup_single_issuer(),
    };
    let mut ring = builder.build(depth as u32 + 1)?;
    let kick = EventFd::new(0)?;
    if variant.fixed_file {
        ring.submitter().register_files(&[file.as_raw_fd()])?;
    }
    if variant.fixed_buffers {
        let vectors: Vec<libc::iovec> = blocks
            .iter_mut()
            .map(|block| libc::iovec { iov_base: block.0.as_mut_ptr().cast(), iov_len: BLOCK })
            .collect();
        // SAFETY: the blocks live until the ring is dropped at the end of this function.
        unsafe { ring.submitter().register_buffers(&vectors) }?;
    }
    if variant.kick {
        let target: *mut u64 = &mut kicks;
        let entry = opcode::Read::new(types::Fd(kick.as_raw_fd()), target.cast(), 8)
            .build()
            .user_data(u64::MAX);
        // SAFETY: `kicks` outlives the ring, which is dropped first.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    }

    let mut free: Vec<usize> = (0..depth).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut requests, mut enters) = (0u64, 0u64);
    let (start, cpu) = (Instant::now(), thread_cpu());
    let mut in_flight = 0;
    while start.elapsed() < TIME || in_flight > 0 {
        while let Some(slot) = (start.elapsed() < TIME).then(|| free.pop()).flatten() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let offset = random % (FILE_BYTES / BLOCK as u64) * BLOCK as u64;
            let buffer = blocks[slot].0.as_mut_ptr();
            let length = BLOCK as u32;
            let entry = match (variant.fixed_buffers, variant.fixed_file) {
                (true, true) => {
                    opcode::ReadFixed::new(types::Fixed(0), buffer, length, slot as u16)
                        .offset(offset)
                        .build()
                }
                (false, true) => {
                    opcode::Read::new(types::Fixed(0), buffer, length).offset(offset).build()
                }
                (_, false) => opcode::Read::new(types::Fd(file.as_raw_fd()), buffer, length)
                    .offset(offset)
                    .build(),
            };
            // SAFETY: the block is this slot's alone until its completion was seen, and lives longer
            // than the ring.
            unsafe { ring.submission().push(&entry.user_data(slot as u64)) }
                .map_err(io::Error::other)?;
            in_flight += 1;
            if !variant.batch {
                ring.submit()?;
                enters += 1;
            }
        }
        if in_flight == 0 {
            break; // the time was over before the first of a new batch
        }
        ring.submit_and_wait(1)?;
        enters += 1;
        for entry in ring.completion() {
            if entry.user_data() == u64::MAX {
                continue;
            }
            if entry.result() != BLOCK as i32 {
                return Err(io::Error::from_raw_os_error(-entry.result()));
            }
            free.push(entry.user_data() as usize);
            in_flight -= 1;
            requests += 1;
        }
    }
    let (wall, cpu) = (start.elapsed(), thread_cpu() - cpu);
    drop(ring);
    let requests = requests as f64;
    Ok(Measured {
        cpu_ns: cpu.as_nanos() as f64 / requests,
        wall_ns: wall.as_nanos() as f64 / requests,
        enters: enters as f64 / requests,
    })
}

/// What this thread has used of a CPU.
fn thread_cpu() -> Duration {
    // SAFETY: an all-zero timespec is valid storage, and the only thing written.
    let time = unsafe {
        let mut time: libc::timespec = mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time);
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
