//! One setting of both sides: what it means as options, and what of it can change in a guest that runs.

use std::collections::BTreeMap;
use std::fmt;

/// A parameter that plans vary. It has the name of the option of `pollux run`, with `_` for `-`.
pub struct Axis {
    /// As in a plan.
    pub name: &'static str,
    /// How it is given.
    pub is: Place,
}

/// How a parameter is given, and whether it can change while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An option; another value takes another boot.
    Boot,
    /// A flag, of the values `on` and `off`.
    Flag,
    /// A part of `--disk`.
    Disk,
    /// An option; it can be changed over the control socket.
    Host,
    /// An option; it can be changed in the guest, where it is a parameter of the module `haltpoll`.
    Guest,
}

const fn axis(name: &'static str, is: Place) -> Axis {
    Axis { name, is }
}

/// All of them, in the order of tables and options.
pub const AXES: &[Axis] = &[
    axis("halt", Place::Boot),
    axis("guest_idle", Place::Boot),
    axis("dedicated", Place::Flag),
    axis("engine", Place::Disk),
    axis("packed", Place::Disk),
    axis("event_idx", Place::Disk),
    axis("direct", Place::Disk),
    axis("guest_halt_poll_ns", Place::Guest),
    axis("guest_halt_poll_grow", Place::Guest),
    axis("guest_halt_poll_grow_start", Place::Guest),
    axis("guest_halt_poll_shrink", Place::Guest),
    axis("guest_halt_poll_allow_shrink", Place::Guest),
    axis("halt_poll_ns", Place::Host),
    axis("halt_poll_ns_grow", Place::Host),
    axis("halt_poll_ns_grow_start", Place::Host),
    axis("halt_poll_ns_shrink", Place::Host),
    axis("io_poll_ns", Place::Host),
];

/// Values by axis, as options take them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting(pub BTreeMap<String, String>);

impl Setting {
    /// The same with one value more.
    pub fn with(&self, axis: &str, value: String) -> Self {
        let mut setting = self.clone();
        setting.0.insert(axis.to_owned(), value);
        setting
    }

    fn is(&self, axis: &str, value: &str) -> bool {
        self.0.get(axis).is_some_and(|found| found == value)
    }

    /// Parameters of a governor that does not run, or of a window that is always 0, change nothing:
    /// settings that differ in them are the same. Pollux would refuse the first.
    pub fn without_what_has_no_effect(mut self) -> Self {
        if self.is("guest_idle", "halt") || self.is("guest_idle", "poll") {
            self.0.retain(|axis, _| !axis.starts_with("guest_halt_poll_"));
        }
        if self.is("halt_poll_ns", "0") {
            self.0.retain(|axis, _| axis == "halt_poll_ns" || !axis.starts_with("halt_poll_ns_"));
        }
        self
    }

    /// The values of axes that are given in this way, in order.
    pub fn of(&self, place: Place) -> impl Iterator<Item = (&'static str, &str)> {
        AXES.iter()
            .filter(move |axis| axis.is == place)
            .filter_map(|axis| Some((axis.name, self.0.get(axis.name)?.as_str())))
    }

    /// As options of `pollux run`, without those of its disk.
    pub fn options(&self) -> Vec<String> {
        let mut words = Vec::new();
        for axis in AXES {
            let Some(value) = self.0.get(axis.name) else { continue };
            let option = format!("--{}", axis.name.replace('_', "-"));
            match axis.is {
                Place::Disk => {}
                Place::Flag => words.extend((value == "on").then_some(option)),
                Place::Boot | Place::Host | Place::Guest => words.extend([option, value.clone()]),
            }
        }
        words
    }

    /// As the end of a `--disk` option: `,engine=sync`.
    pub fn disk_options(&self) -> String {
        self.of(Place::Disk)
            .map(|(name, value)| format!(",{}={value}", name.replace('_', "-")))
            .collect()
    }

    /// What settings that can share a boot have in common. What can change there is in it by its name
    /// only, for what is not given cannot be taken back to what the guest or host had.
    pub fn boot_key(&self) -> Vec<String> {
        let key = |(axis, value): (&String, &String)| {
            let live = AXES
                .iter()
                .any(|known| known.name == axis && matches!(known.is, Place::Host | Place::Guest));
            if live { axis.clone() } else { format!("{axis}={value}") }
        };
        self.0.iter().map(key).collect()
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = AXES.iter().filter_map(|axis| self.0.get_key_value(axis.name));
        // What is set of a peer is no axis.
        let other = self.0.iter().filter(|(name, _)| !AXES.iter().any(|axis| axis.name == *name));
        let words: Vec<String> =
            known.chain(other).map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(values: &[(&str, &str)]) -> Setting {
        Setting(values.iter().map(|&(axis, value)| (axis.into(), value.into())).collect())
    }

    #[test]
    fn a_setting_is_options_in_a_fixed_order() {
        let all = setting(&[
            ("io_poll_ns", "1us"),
            ("dedicated", "on"),
            ("engine", "sync"),
            ("event_idx", "off"),
            ("halt", "user"),
            ("guest_halt_poll_ns", "5"),
        ]);
        let expected =
            ["--halt", "user", "--dedicated", "--guest-halt-poll-ns", "5", "--io-poll-ns", "1us"];
        assert_eq!(all.options(), expected);
        assert_eq!(all.disk_options(), ",engine=sync,event-idx=off");
        assert!(setting(&[("dedicated", "off")]).options().is_empty());
    }

    #[test]
    fn settings_that_differ_in_live_parameters_share_a_boot() {
        let base = setting(&[("halt", "user"), ("halt_poll_ns", "0")]);
        assert_eq!(base.boot_key(), base.with("halt_poll_ns", "5".into()).boot_key());
        assert_ne!(base.boot_key(), base.with("halt", "kernel".into()).boot_key());
        assert_ne!(base.boot_key(), base.with("io_poll_ns", "0".into()).boot_key());
    }

    #[test]
    fn what_has_no_effect_makes_no_other_setting() {
        let grown = setting(&[
            ("guest_idle", "halt"),
            ("guest_halt_poll_ns", "5"),
            ("halt_poll_ns", "0"),
            ("halt_poll_ns_grow", "2"),
        ]);
        let expected = setting(&[("guest_idle", "halt"), ("halt_poll_ns", "0")]);
        assert_eq!(grown.without_what_has_no_effect(), expected);
        let polled = setting(&[("halt_poll_ns", "5"), ("halt_poll_ns_grow", "2")]);
        assert_eq!(polled.clone().without_what_has_no_effect(), polled);
    }
}
