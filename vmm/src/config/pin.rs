//! `--pin`: which thread runs on which host CPU.

use std::collections::BTreeMap;
use std::io;

use serde::Serialize;

use super::ConfigError;

const OPTION: &str = "--pin";

/// Threads that are pinned, each to one host CPU. Who is in neither map runs anywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pinning {
    /// Host CPU by vCPU.
    pub vcpus: BTreeMap<u32, usize>,
    /// Host CPU by disk queue; queues are counted from 0 over all disks, in their order.
    pub io: BTreeMap<u32, usize>,
}

impl Pinning {
    /// Parses `vcpu0=2,io0=3`, for a VM of `vcpus` vCPUs and `queues` disk queues, on a host whose
    /// usable CPUs are `usable`.
    pub(super) fn parse(
        text: &str,
        vcpus: u32,
        queues: u32,
        usable: &[usize],
    ) -> Result<Self, ConfigError> {
        let mut pinning = Self::default();
        for item in text.split(',') {
            let bad = |problem: String| ConfigError::new(OPTION, item, problem);
            let parsed = item.split_once('=').and_then(|(thread, cpu)| {
                let (kind, index) =
                    thread.split_at_checked(thread.find(|c: char| c.is_ascii_digit())?)?;
                Some((kind, index.parse::<u32>().ok()?, cpu.parse::<usize>().ok()?))
            });
            let Some((kind @ ("vcpu" | "io"), index, cpu)) = parsed else {
                return Err(bad("not a thread and its host CPU".to_owned())
                    .hint("use vcpuN=CPU or ioN=CPU, as vcpu0=2,io0=3"));
            };
            let (map, count, noun) = if kind == "vcpu" {
                (&mut pinning.vcpus, vcpus, "vCPU")
            } else {
                (&mut pinning.io, queues, "disk queue")
            };
            if index >= count {
                return Err(bad(match count {
                    0 => format!("there is no {noun}"),
                    1 => format!("there is only one {noun}, {kind}0"),
                    _ => format!("the last {noun} is {kind}{}", count - 1),
                }));
            }
            if !usable.contains(&cpu) {
                return Err(bad(format!("host CPU {cpu} is not there for this process"))
                    .hint(format!("use one of {}", ranges(usable))));
            }
            if map.insert(index, cpu).is_some() {
                return Err(bad(format!("{kind}{index} is pinned twice")));
            }
        }
        Ok(pinning)
    }
}

/// The host CPUs that this process may use, ascending.
pub(super) fn usable_cpus() -> io::Result<Vec<usize>> {
    // The kernel's mask may be wider than libc's cpu_set_t, so it is read into words of our own.
    let mut mask = vec![0u64; 1024 / 64];
    loop {
        // SAFETY: `mask` is a valid buffer of as many bytes as are passed, and the kernel writes no
        // more than that.
        let bytes = unsafe {
            libc::syscall(
                libc::SYS_sched_getaffinity,
                0,
                size_of_val(mask.as_slice()),
                mask.as_mut_ptr(),
            )
        };
        if bytes >= 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) || mask.len() > 1 << 16 {
            return Err(error);
        }
        mask.resize(mask.len() * 2, 0);
    }
    Ok((0..mask.len() * 64).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1).collect())
}

/// "0-3,6" for 0, 1, 2, 3, 6.
fn ranges(cpus: &[usize]) -> String {
    cpus.chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            [only] => only.to_string(),
            [] => String::new(),
        })
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Pinning, String> {
        Pinning::parse(text, 2, 3, &[0, 1, 2, 3, 6]).map_err(|error| error.to_string())
    }

    #[test]
    fn vcpus_and_queues_are_pinned_each_to_its_cpu() {
        let pinning = parse("vcpu0=2,io0=3,vcpu1=2,io2=6").unwrap();
        assert_eq!(pinning.vcpus, BTreeMap::from([(0, 2), (1, 2)]));
        assert_eq!(pinning.io, BTreeMap::from([(0, 3), (2, 6)]));
    }

    #[test]
    fn what_is_no_pin_is_refused_with_the_right_form() {
        for text in
            ["", "vcpu0", "vcpu=1", "cpu0=1", "vcpu0=", "vcpu0=x", "vcpu-1=0", "vcpu0=0,", "é0=1"]
        {
            assert!(parse(text).unwrap_err().contains("vcpu0=2,io0=3"), "{text}");
        }
    }

    #[test]
    fn threads_that_do_not_exist_are_refused() {
        assert!(parse("vcpu2=0").unwrap_err().contains("the last vCPU is vcpu1"));
        assert!(parse("io3=0").unwrap_err().contains("the last disk queue is io2"));
        let error = Pinning::parse("io0=0", 1, 0, &[0]).unwrap_err().to_string();
        assert!(error.contains("there is no disk queue"), "{error}");
        let error = Pinning::parse("vcpu1=0", 1, 0, &[0]).unwrap_err().to_string();
        assert!(error.contains("only one vCPU"), "{error}");
    }

    #[test]
    fn a_cpu_this_process_may_not_use_is_refused_with_those_it_may() {
        let message = parse("vcpu0=4").unwrap_err();
        assert!(message.starts_with("--pin vcpu0=4: host CPU 4"), "{message}");
        assert!(message.contains("0-3,6"), "{message}");
    }

    #[test]
    fn a_thread_is_pinned_once() {
        assert!(parse("io0=1,io0=1").unwrap_err().contains("io0 is pinned twice"));
    }

    #[test]
    fn this_process_runs_on_a_cpu_it_may_use() {
        // SAFETY: takes no argument and has no precondition.
        let here = usize::try_from(unsafe { libc::sched_getcpu() }).unwrap();
        assert!(usable_cpus().unwrap().contains(&here));
    }
}
