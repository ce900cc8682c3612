//! How the guest idles: the kernel arguments that say so, and their contradictions.

use serde::Serialize;

use super::ConfigError;
use super::units::{choice, number, switch, time_ns};
use crate::cli::RunArgs;

/// `--guest-idle`: what a vCPU of the guest does when it has nothing to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestIdle {
    /// What the guest chooses.
    Default,
    /// The haltpoll cpuidle driver is made to load: the guest polls, then executes HLT.
    Haltpoll,
    /// HLT at once.
    Halt,
    /// The guest polls and never executes HLT.
    Poll,
}

impl GuestIdle {
    const CHOICES: [(&str, Self); 4] = [
        ("default", Self::Default),
        ("haltpoll", Self::Haltpoll),
        ("halt", Self::Halt),
        ("poll", Self::Poll),
    ];

    fn kernel_argument(self) -> Option<&'static str> {
        match self {
            Self::Default => None,
            Self::Haltpoll => Some("cpuidle_haltpoll.force=1"),
            Self::Halt => Some("idle=halt"),
            Self::Poll => Some("idle=poll"),
        }
    }
}

/// Parameters of the guest's haltpoll governor. What is `None` keeps the guest kernel's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuestHaltPoll {
    /// The longest poll window, in nanoseconds.
    pub guest_halt_poll_ns: Option<u32>,
    /// What the window is multiplied by when it grows.
    pub guest_halt_poll_grow: Option<u32>,
    /// The least window after growing, in nanoseconds.
    pub guest_halt_poll_grow_start: Option<u32>,
    /// What the window is divided by when it shrinks; 0 makes it 0.
    pub guest_halt_poll_shrink: Option<u32>,
    /// Whether the window may shrink.
    pub guest_halt_poll_allow_shrink: Option<bool>,
}

impl GuestHaltPoll {
    fn parse(args: &RunArgs) -> Result<Self, ConfigError> {
        fn each<T>(
            option: &'static str,
            text: &Option<String>,
            parse: impl Fn(&'static str, &str) -> Result<T, ConfigError>,
        ) -> Result<Option<T>, ConfigError> {
            text.as_deref().map(|text| parse(option, text)).transpose()
        }
        Ok(Self {
            guest_halt_poll_ns: each("--guest-halt-poll-ns", &args.guest_halt_poll_ns, time_ns)?,
            guest_halt_poll_grow: each(
                "--guest-halt-poll-grow",
                &args.guest_halt_poll_grow,
                number,
            )?,
            guest_halt_poll_grow_start: each(
                "--guest-halt-poll-grow-start",
                &args.guest_halt_poll_grow_start,
                time_ns,
            )?,
            guest_halt_poll_shrink: each(
                "--guest-halt-poll-shrink",
                &args.guest_halt_poll_shrink,
                number,
            )?,
            guest_halt_poll_allow_shrink: each(
                "--guest-halt-poll-allow-shrink",
                &args.guest_halt_poll_allow_shrink,
                switch,
            )?,
        })
    }

    /// The parameters that are set: option, kernel parameter, value.
    fn set(&self) -> Vec<(&'static str, &'static str, u32)> {
        [
            ("--guest-halt-poll-ns", "guest_halt_poll_ns", self.guest_halt_poll_ns),
            ("--guest-halt-poll-grow", "guest_halt_poll_grow", self.guest_halt_poll_grow),
            (
                "--guest-halt-poll-grow-start",
                "guest_halt_poll_grow_start",
                self.guest_halt_poll_grow_start,
            ),
            ("--guest-halt-poll-shrink", "guest_halt_poll_shrink", self.guest_halt_poll_shrink),
            (
                "--guest-halt-poll-allow-shrink",
                "guest_halt_poll_allow_shrink",
                self.guest_halt_poll_allow_shrink.map(u32::from),
            ),
        ]
        .into_iter()
        .filter_map(|(option, name, value)| Some((option, name, value?)))
        .collect()
    }
}

/// The kernel arguments that make the guest idle as it was asked to, in order.
pub(super) fn kernel_arguments(idle: GuestIdle, poll: &GuestHaltPoll) -> Vec<String> {
    let parameters = poll.set().into_iter().map(|(_, name, v)| format!("haltpoll.{name}={v}"));
    idle.kernel_argument().map(str::to_owned).into_iter().chain(parameters).collect()
}

/// Parses the guest's side of halting, and refuses what contradicts itself: the haltpoll driver
/// does not load when the kernel command line has any `idle=` or switches cpuidle off, and does not
/// get its governor when another is named.
pub(super) fn parse(args: &RunArgs) -> Result<(GuestIdle, GuestHaltPoll), ConfigError> {
    let idle = choice("--guest-idle", &args.guest_idle, &GuestIdle::CHOICES)?;
    let poll = GuestHaltPoll::parse(args)?;
    let parameter = poll.set().first().copied();

    if let (GuestIdle::Halt | GuestIdle::Poll, Some((option, _, value))) = (idle, parameter) {
        let argument = idle.kernel_argument().unwrap_or_default();
        return Err(ConfigError::new(
            option,
            value,
            format!("has no effect, as {argument} keeps the haltpoll driver from loading"),
        )
        .hint("leave it out, or use --guest-idle haltpoll"));
    }

    // An idle= of the user's own, with nothing asked for here, is the user's business.
    let asked = match (idle, parameter) {
        (GuestIdle::Default, None) => return Ok((idle, poll)),
        (GuestIdle::Default, Some((option, ..))) => option.to_owned(),
        _ => format!("--guest-idle {}", args.guest_idle),
    };
    let own = arguments(args.cmdline.as_deref().unwrap_or_default());
    let wants_haltpoll = !matches!(idle, GuestIdle::Halt | GuestIdle::Poll);
    let contradicts = |argument: &&str| {
        argument.starts_with("idle=")
            || wants_haltpoll
                && (*argument == "cpuidle.off=1"
                    || argument
                        .strip_prefix("cpuidle.governor=")
                        .is_some_and(|governor| governor != "haltpoll"))
    };
    if let Some(argument) = own.into_iter().find(contradicts) {
        let why = if wants_haltpoll {
            "which needs the guest's haltpoll driver and governor"
        } else {
            "which sets idle= itself"
        };
        return Err(ConfigError::new("--cmdline", argument, format!("contradicts {asked}, {why}"))
            .hint("leave out one of the two"));
    }
    Ok((idle, poll))
}

/// The kernel's own arguments in `cmdline`: separated by blanks outside of double quotes, up to a
/// lone `--`, after which they are init's.
fn arguments(cmdline: &str) -> Vec<&str> {
    let mut quoted = false;
    cmdline
        .split(move |c: char| {
            quoted ^= c == '"';
            !quoted && c.is_ascii_whitespace()
        })
        .take_while(|argument| *argument != "--")
        .map(|argument| argument.trim_matches('"'))
        .filter(|argument| !argument.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::run_args;
    use super::*;

    fn parse_words(words: &[&str]) -> Result<Vec<String>, String> {
        parse(&run_args(words))
            .map(|(idle, poll)| kernel_arguments(idle, &poll))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn each_choice_becomes_its_kernel_argument() {
        for (choice, arguments) in [
            ("default", &[][..]),
            ("haltpoll", &["cpuidle_haltpoll.force=1"]),
            ("halt", &["idle=halt"]),
            ("poll", &["idle=poll"]),
        ] {
            assert_eq!(parse_words(&["--guest-idle", choice]).unwrap(), arguments);
        }
        assert!(parse_words(&["--guest-idle", "mwait"]).unwrap_err().contains("haltpoll"));
    }

    #[test]
    fn parameters_keep_the_names_and_units_of_the_kernel() {
        let words = "--guest-idle haltpoll --guest-halt-poll-ns 200us --guest-halt-poll-grow 3 \
                     --guest-halt-poll-grow-start 50us --guest-halt-poll-shrink 0 \
                     --guest-halt-poll-allow-shrink off";
        assert_eq!(
            parse_words(&words.split_whitespace().collect::<Vec<_>>()).unwrap(),
            [
                "cpuidle_haltpoll.force=1",
                "haltpoll.guest_halt_poll_ns=200000",
                "haltpoll.guest_halt_poll_grow=3",
                "haltpoll.guest_halt_poll_grow_start=50000",
                "haltpoll.guest_halt_poll_shrink=0",
                "haltpoll.guest_halt_poll_allow_shrink=0",
            ]
        );
    }

    #[test]
    fn bad_parameters_are_refused_by_their_own_names() {
        for option in [
            "--guest-halt-poll-ns",
            "--guest-halt-poll-grow",
            "--guest-halt-poll-grow-start",
            "--guest-halt-poll-shrink",
            "--guest-halt-poll-allow-shrink",
        ] {
            let message = parse_words(&[option, "many"]).unwrap_err();
            assert!(message.starts_with(&format!("{option} many: ")), "{message}");
        }
    }

    #[test]
    fn idle_on_the_command_line_contradicts_haltpoll() {
        for own in ["idle=poll", "quiet idle=nomwait", "\"idle=halt\"", "cpuidle.off=1"] {
            let message = parse_words(&["--guest-idle", "haltpoll", "--cmdline", own]).unwrap_err();
            assert!(message.contains("--guest-idle haltpoll"), "{message}");
            let message = parse_words(&["--guest-halt-poll-ns", "0", "--cmdline", own]);
            assert!(message.unwrap_err().contains("--guest-halt-poll-ns"));
        }
        let menu = ["--guest-idle", "haltpoll", "--cmdline", "cpuidle.governor=menu"];
        assert!(parse_words(&menu).unwrap_err().contains("cpuidle.governor=menu"));
    }

    #[test]
    fn two_idle_arguments_contradict_each_other() {
        let message = parse_words(&["--guest-idle", "halt", "--cmdline", "idle=poll"]).unwrap_err();
        assert_eq!(
            message,
            "--cmdline idle=poll: contradicts --guest-idle halt, which sets idle= itself \
             (leave out one of the two)"
        );
    }

    #[test]
    fn parameters_contradict_a_guest_that_does_not_use_haltpoll() {
        for idle in ["halt", "poll"] {
            let words = ["--guest-idle", idle, "--guest-halt-poll-shrink", "2"];
            let message = parse_words(&words).unwrap_err();
            assert!(message.starts_with("--guest-halt-poll-shrink 2: "), "{message}");
            assert!(message.contains(&format!("idle={idle}")), "{message}");
        }
    }

    #[test]
    fn what_only_looks_like_idle_is_no_contradiction() {
        for own in ["idle=poll", "cpuidle.off=1"] {
            assert!(parse_words(&["--cmdline", own]).is_ok(), "the user's own business: {own}");
        }
        for own in
            ["intel_idle=1", "x=\"a idle=poll\"", "-- idle=poll", "cpuidle.governor=haltpoll"]
        {
            assert!(parse_words(&["--guest-idle", "haltpoll", "--cmdline", own]).is_ok(), "{own}");
        }
        assert!(parse_words(&["--guest-idle", "halt", "--cmdline", "cpuidle.off=1"]).is_ok());
    }
}
