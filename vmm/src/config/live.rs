//! What of the configuration can be changed while the VM runs.

use super::units::{alternatives, number, time_ns};
use super::{ConfigError, VmConfig, halt};

const NAMES: [&str; 5] = [
    "halt_poll_ns",
    "halt_poll_ns_grow",
    "halt_poll_ns_grow_start",
    "halt_poll_ns_shrink",
    "io_poll_ns",
];

impl VmConfig {
    /// Changes a parameter of the host's side: `name` as in the statistics, `text` as the option of
    /// that name takes it. Only the configuration changes; to put it in force is the caller's.
    ///
    /// # Errors
    /// There is no such parameter, it does not take this, or it would have no effect or one on other
    /// VMs that nobody agreed to. The configuration may then be changed in part.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), ConfigError> {
        let poll = &mut self.halt_poll;
        match name {
            "halt_poll_ns" => poll.halt_poll_ns = Some(time_ns("halt_poll_ns=", text)?),
            "halt_poll_ns_grow" => {
                poll.halt_poll_ns_grow = Some(number("halt_poll_ns_grow=", text)?);
            }
            "halt_poll_ns_grow_start" => {
                poll.halt_poll_ns_grow_start = Some(time_ns("halt_poll_ns_grow_start=", text)?);
            }
            "halt_poll_ns_shrink" => {
                poll.halt_poll_ns_shrink = Some(number("halt_poll_ns_shrink=", text)?);
            }
            "io_poll_ns" => {
                self.io_poll_ns = time_ns("io_poll_ns=", text)?;
                self.disks.iter_mut().for_each(|disk| disk.io_poll_ns = self.io_poll_ns);
            }
            _ => {
                return Err(ConfigError::new("set", name, "not a parameter that can be changed")
                    .hint(format!("use {}", alternatives(&NAMES))));
            }
        }
        halt::check(self.halt, &self.halt_poll, self.allow_host_tuning)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::run_args;
    use super::*;

    fn config(words: &[&str]) -> VmConfig {
        VmConfig::parse(&run_args(words)).unwrap()
    }

    #[test]
    fn every_parameter_that_is_named_can_be_set_in_mode_user() {
        let mut config = config(&["--halt", "user", "--disk", "path=a", "--disk", "path=b"]);
        for (value, name) in (1..).zip(NAMES) {
            config.set(name, &format!("{value}")).unwrap();
        }
        let poll = config.halt_poll;
        assert_eq!((poll.halt_poll_ns, poll.halt_poll_ns_grow), (Some(1), Some(2)));
        assert_eq!((poll.halt_poll_ns_grow_start, poll.halt_poll_ns_shrink), (Some(3), Some(4)));
        assert_eq!(config.io_poll_ns, 5);
        assert!(config.disks.iter().all(|disk| disk.io_poll_ns == 5), "a restart keeps it");
        config.set("halt_poll_ns", "200us").unwrap();
        assert_eq!(config.halt_poll.halt_poll_ns, Some(200_000));
    }

    #[test]
    fn what_cannot_be_set_is_refused_with_what_can() {
        for (words, name, text, expected) in [
            (&["--halt", "user"][..], "cpus", "2", "set cpus: not a parameter"),
            (&["--halt", "user"], "cpus", "2", "halt_poll_ns_shrink or io_poll_ns"),
            (&["--halt", "user"], "halt_poll_ns", "5x", "halt_poll_ns=5x: not a time"),
            (&["--halt", "user"], "halt_poll_ns_grow", "5us", "halt_poll_ns_grow=5us: not a num"),
            (&[], "halt_poll_ns_grow", "3", "add --allow-host-tuning"),
            (&["--halt", "passthrough"], "halt_poll_ns", "3", "has no effect"),
        ] {
            let error = config(words).set(name, text).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        config(&["--allow-host-tuning"]).set("halt_poll_ns_grow", "3").unwrap();
        config(&[]).set("halt_poll_ns", "3").unwrap();
    }
}
