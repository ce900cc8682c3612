//! Which values of `--halt` this KVM can do.

use std::fmt;

use serde::Serialize;

use super::capabilities::Capability;
use super::tiny::Outcome;
use crate::vcpu::passthrough;

/// A value of `--halt`, and whether it works.
#[derive(Debug, Serialize)]
pub(super) struct HaltMode {
    /// The value.
    pub(super) mode: &'static str,
    /// Who waits.
    pub(super) purpose: &'static str,
    /// It works.
    pub(super) usable: bool,
    /// Why it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
}

impl HaltMode {
    fn new(mode: &'static str, purpose: &'static str, problem: Option<String>) -> Self {
        Self { mode, purpose, usable: problem.is_none(), problem }
    }
}

/// All of them. `halted`: what became of a guest that executes HLT in a VM without a local APIC.
pub(super) fn modes(capabilities: &[Capability], halted: &Outcome) -> Vec<HaltMode> {
    let value = |name: &str| {
        capabilities.iter().find(|capability| capability.name == name).map_or(0, |c| c.value)
    };
    let lacks = |names: &[&str]| {
        names.iter().find(|name| value(name) <= 0).map(|name| format!("KVM lacks {name}"))
    };
    let kernel = lacks(&["KVM_CAP_IRQCHIP", "KVM_CAP_IRQ_ROUTING", "KVM_CAP_IRQFD"]);
    let user = lacks(&["KVM_CAP_X86_USER_SPACE_MSR", "KVM_CAP_X86_MSR_FILTER"]).or_else(|| {
        (*halted != Outcome::Halted)
            .then(|| format!("HLT does not come to userspace without a local APIC: it {halted}"))
    });
    let mask = value("KVM_CAP_X86_DISABLE_EXITS");
    let passthrough = kernel.clone().or_else(|| {
        (!passthrough::allows_hlt(mask))
            .then(|| format!("KVM_CAP_X86_DISABLE_EXITS is {mask:#x}, without HLT (0x2)"))
    });
    vec![
        HaltMode::new("kernel", "in KVM, which polls first", kernel),
        HaltMode::new("user", "in Pollux, which polls first and has the local APIC", user),
        HaltMode::new("passthrough", "in the guest: HLT does not leave it", passthrough),
    ]
}

impl fmt::Display for HaltMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.usable { "yes" } else { "no" };
        writeln!(f, "  {verdict:<6}--halt {:<14}{}", self.mode, self.purpose)?;
        match &self.problem {
            Some(problem) => writeln!(f, "  {:<6}{:<21}  {problem}", "", ""),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::capabilities::Need;
    use super::*;

    /// A KVM that has everything but what `values` say.
    fn usable(values: &[(&'static str, i32)], halted: &Outcome) -> Vec<&'static str> {
        let names = [
            "KVM_CAP_IRQCHIP",
            "KVM_CAP_IRQ_ROUTING",
            "KVM_CAP_IRQFD",
            "KVM_CAP_X86_USER_SPACE_MSR",
            "KVM_CAP_X86_MSR_FILTER",
            "KVM_CAP_X86_DISABLE_EXITS",
        ];
        let capabilities = names.map(|name| {
            let value = values.iter().find(|(other, _)| *other == name).map_or(0xf, |v| v.1);
            let present = value > 0;
            Capability { name, value, present, need: Need::Optional, purpose: "", advice: None }
        });
        let modes = modes(&capabilities, halted);
        assert!(modes.iter().all(|mode| mode.usable == mode.problem.is_none()));
        modes.into_iter().filter(|mode| mode.usable).map(|mode| mode.mode).collect()
    }

    #[test]
    fn a_mode_works_only_with_all_it_needs() {
        let halted = &Outcome::Halted;
        assert_eq!(usable(&[], halted), ["kernel", "user", "passthrough"]);
        assert_eq!(usable(&[("KVM_CAP_IRQFD", 0)], halted), ["user"]);
        assert_eq!(usable(&[("KVM_CAP_X86_MSR_FILTER", 0)], halted), ["kernel", "passthrough"]);
        assert_eq!(usable(&[("KVM_CAP_X86_DISABLE_EXITS", 0b1101)], halted), ["kernel", "user"]);
        assert_eq!(usable(&[], &Outcome::Hung), ["kernel", "passthrough"]);
    }
}
