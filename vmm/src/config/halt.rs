//! How a vCPU that has nothing to do waits on the host's side: the mode, and the parameters of halt
//! polling, which are the VM's own or the host's, depending on the mode.

use serde::Serialize;

use super::ConfigError;
use super::units::{choice, number, time_ns};
use crate::cli::RunArgs;

/// `--halt`: where a halted vCPU waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Halt {
    /// In KVM, which has the local APIC.
    Kernel,
    /// In Pollux, which has the local APIC.
    User,
    /// In the guest: HLT does not leave it, and the host CPU waits.
    Passthrough,
}

impl Halt {
    const CHOICES: [(&str, Self); 3] =
        [("kernel", Self::Kernel), ("user", Self::User), ("passthrough", Self::Passthrough)];
}

/// The host's side of halt polling, with the names of KVM's parameters. What is `None` keeps its
/// value: the module's in mode `kernel`, Linux's default in mode `user`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HaltPoll {
    /// The largest poll window, in nanoseconds. The VM's own in both modes.
    pub halt_poll_ns: Option<u32>,
    /// What the window is multiplied by when it grows. Of all the host's VMs in mode `kernel`, as
    /// are the next two.
    pub halt_poll_ns_grow: Option<u32>,
    /// The least window after growing, in nanoseconds.
    pub halt_poll_ns_grow_start: Option<u32>,
    /// What the window is divided by when it shrinks; 0 makes it 0.
    pub halt_poll_ns_shrink: Option<u32>,
}

impl HaltPoll {
    /// The parameters that KVM has for all VMs only, where they are set: option, name, value.
    fn of_the_host(&self) -> impl Iterator<Item = (&'static str, &'static str, u32)> {
        [
            ("--halt-poll-ns-grow", "halt_poll_ns_grow", self.halt_poll_ns_grow),
            ("--halt-poll-ns-grow-start", "halt_poll_ns_grow_start", self.halt_poll_ns_grow_start),
            ("--halt-poll-ns-shrink", "halt_poll_ns_shrink", self.halt_poll_ns_shrink),
        ]
        .into_iter()
        .filter_map(|(option, name, value)| Some((option, name, value?)))
    }

    /// The first parameter that is set: option and value.
    fn first(&self) -> Option<(&'static str, u32)> {
        let own = self.halt_poll_ns.map(|value| ("--halt-poll-ns", value));
        own.or_else(|| self.of_the_host().next().map(|(option, _, value)| (option, value)))
    }
}

/// A parameter of the host's module `kvm` to be set while the VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostParameter {
    /// The option that asks for it.
    pub option: &'static str,
    /// Its name in `/sys/module/kvm/parameters`.
    pub name: &'static str,
    /// What it is to be.
    pub value: u32,
}

/// What of `poll` is to be set in the host's module.
pub(super) fn host_parameters(halt: Halt, poll: &HaltPoll) -> Vec<HostParameter> {
    if halt != Halt::Kernel {
        return Vec::new();
    }
    poll.of_the_host().map(|(option, name, value)| HostParameter { option, name, value }).collect()
}

/// Parses the host's side of halting.
pub(super) fn parse(args: &RunArgs) -> Result<(Halt, HaltPoll), ConfigError> {
    let halt = choice("--halt", &args.halt, &Halt::CHOICES)?;
    let time = |option, text: &Option<String>| {
        text.as_deref().map(|text| time_ns(option, text)).transpose()
    };
    let factor = |option, text: &Option<String>| {
        text.as_deref().map(|text| number(option, text)).transpose()
    };
    let poll = HaltPoll {
        halt_poll_ns: time("--halt-poll-ns", &args.halt_poll_ns)?,
        halt_poll_ns_grow: factor("--halt-poll-ns-grow", &args.halt_poll_ns_grow)?,
        halt_poll_ns_grow_start: time("--halt-poll-ns-grow-start", &args.halt_poll_ns_grow_start)?,
        halt_poll_ns_shrink: factor("--halt-poll-ns-shrink", &args.halt_poll_ns_shrink)?,
    };
    check(halt, &poll, args.allow_host_tuning)?;
    Ok((halt, poll))
}

/// Refuses parameters that would have no effect, or one on other VMs that nobody agreed to.
pub(super) fn check(
    halt: Halt,
    poll: &HaltPoll,
    allow_host_tuning: bool,
) -> Result<(), ConfigError> {
    match halt {
        Halt::Passthrough => {
            if let Some((option, value)) = poll.first() {
                let problem = "has no effect with --halt passthrough, where HLT does not leave the \
                               guest and nothing of the host's polls";
                return Err(
                    ConfigError::new(option, value, problem).hint("leave out one of the two")
                );
            }
        }
        Halt::Kernel if !allow_host_tuning => {
            if let Some((option, name, value)) = poll.of_the_host().next() {
                let problem = format!(
                    "with --halt kernel this is the parameter {name} of the host's module kvm, and \
                     affects all VMs of the host"
                );
                return Err(ConfigError::new(option, value, problem).hint(
                    "add --allow-host-tuning to have it changed while this VM runs, or use --halt \
                     user, where it is the VM's own",
                ));
            }
        }
        Halt::Kernel | Halt::User => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::run_args;
    use super::*;

    const HOST: [&str; 3] =
        ["--halt-poll-ns-grow", "--halt-poll-ns-grow-start", "--halt-poll-ns-shrink"];

    fn parsed(words: &[&str]) -> Result<(Halt, HaltPoll), String> {
        parse(&run_args(words)).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_the_hosts_is_refused_without_consent_and_says_whose_it_is() {
        for option in HOST {
            let message = parsed(&[option, "3"]).unwrap_err();
            assert!(message.starts_with(&format!("{option} 3: ")), "{message}");
            for part in ["host's", "all VMs", "--allow-host-tuning", "--halt user"] {
                assert!(message.contains(part), "{part}: {message}");
            }
            assert!(parsed(&[option, "3", "--allow-host-tuning"]).is_ok());
        }
    }

    #[test]
    fn in_mode_user_all_parameters_are_the_vms_own() {
        for option in HOST {
            let (halt, poll) = parsed(&["--halt", "user", option, "3"]).unwrap();
            assert_eq!(halt, Halt::User);
            assert_eq!(host_parameters(halt, &poll), []);
        }
    }

    #[test]
    fn with_consent_they_are_set_under_the_names_of_the_module() {
        let words = "--halt-poll-ns 5us --halt-poll-ns-grow 4 --halt-poll-ns-grow-start 20us \
                     --halt-poll-ns-shrink 0 --allow-host-tuning";
        let (halt, poll) = parsed(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
        assert_eq!(poll.halt_poll_ns, Some(5_000), "this one is the VM's own");
        let set = host_parameters(halt, &poll);
        let set: Vec<_> = set.iter().map(|p| (p.option, p.name, p.value)).collect();
        assert_eq!(
            set,
            [
                (HOST[0], "halt_poll_ns_grow", 4),
                (HOST[1], "halt_poll_ns_grow_start", 20_000),
                (HOST[2], "halt_poll_ns_shrink", 0),
            ]
        );
    }

    #[test]
    fn no_parameter_goes_with_a_halt_that_stays_in_the_guest() {
        assert_eq!(parsed(&["--halt", "passthrough"]).unwrap().0, Halt::Passthrough);
        for option in HOST.into_iter().chain(["--halt-poll-ns"]) {
            let message =
                parsed(&["--halt", "passthrough", "--allow-host-tuning", option, "0"]).unwrap_err();
            assert!(message.starts_with(&format!("{option} 0: has no effect")), "{message}");
        }
    }
}
