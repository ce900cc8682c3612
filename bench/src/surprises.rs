//! What surprises people in the results, found in the figures and told in words.

use crate::results::{Results, Row};
use crate::setting::Setting;

/// Halts a request below which nothing is said of them.
const FEW_HALTS: f64 = 0.05;
/// Settings that are named; of more, their number is told.
const NAMED: usize = 3;

/// A kind of surprise: what is wrong with a row, if it is.
type Check = fn(&Row) -> bool;

const CHECKS: [(Check, &str); 5] = [
    (
        guest_polls,
        "the guest switched host polling off (MSR_KVM_POLL_CONTROL), as its haltpoll driver does: there \
         halt_poll_ns changes nothing, and differences between its values are noise",
    ),
    (
        window_never_reached,
        "the host may poll, but hardly any halt ended while it did (polled_per_request): the wakes came \
         later than the window reaches, or the window never grew",
    ),
    (
        invalid_wakes,
        "of the host's polls, more than one in ten ended for nothing the guest waited for \
         (invalid_per_request): such polls shrink the window",
    ),
    (
        contended,
        "the host took the CPU from vCPUs or workers more than 20 times a second (preemptions_per_s): \
         somebody else wants these CPUs, and who polls there keeps it from them",
    ),
    (
        other_wakes,
        "there were more than 1.5 halts for each interrupt of the disk: timers or other vCPUs end the \
         rest, and a window that is tuned for the disk does not fit them",
    ),
];

/// Every surprise with the rows it was seen in.
pub fn find(results: &Results) -> Vec<String> {
    let of = |(check, text): &(Check, &str)| {
        let seen: Vec<String> = results
            .rows
            .iter()
            .filter(|row| row.monitor == "pollux" && check(row))
            .map(|row| format!("{}: {}", row.workload, Setting(row.setting.clone())))
            .collect();
        let more = seen.len().saturating_sub(NAMED);
        let named = seen.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        (!seen.is_empty()).then(|| format!("{text} ({named}{more})"))
    };
    CHECKS.iter().filter_map(of).collect()
}

fn median(row: &Row, name: &str) -> Option<f64> {
    row.summary.get(name).map(|found| found.median)
}

fn guest_polls(row: &Row) -> bool {
    let notes = row.runs.iter().flat_map(|run| &run.notes);
    let switched_off = notes.into_iter().any(|note| note.contains("MSR_KVM_POLL_CONTROL"));
    switched_off && may_poll(row)
}

/// The setting lets the host poll.
fn may_poll(row: &Row) -> bool {
    row.setting.get("halt_poll_ns").is_some_and(|window| window != "0")
}

fn window_never_reached(row: &Row) -> bool {
    let halts = median(row, "exits_halt_per_request").filter(|&halts| halts > FEW_HALTS);
    match (halts, median(row, "polled_per_request")) {
        (Some(halts), Some(polled)) => may_poll(row) && !guest_polls(row) && polled < 0.02 * halts,
        _ => false,
    }
}

fn invalid_wakes(row: &Row) -> bool {
    match (median(row, "invalid_per_request"), median(row, "polled_per_request")) {
        (Some(invalid), Some(polled)) => invalid > FEW_HALTS && invalid > 0.1 * (polled + invalid),
        _ => false,
    }
}

fn contended(row: &Row) -> bool {
    median(row, "preemptions_per_s").is_some_and(|preemptions| preemptions > 20.0)
}

fn other_wakes(row: &Row) -> bool {
    match (median(row, "exits_halt_per_request"), median(row, "interrupts_per_request")) {
        (Some(halts), Some(interrupts)) => halts > FEW_HALTS && halts > 1.5 * interrupts,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::testing::{results, row, run};
    use crate::analysis::work_out;

    fn found(setting: &[(&str, &str)], figures: &[(&str, f64)], note: Option<&str>) -> Vec<String> {
        let mut run = run(0, figures);
        run.notes.extend(note.map(str::to_owned));
        let mut results = results(vec![row("a", setting, vec![run])], vec![]);
        work_out(&mut results);
        find(&results)
    }

    #[test]
    fn each_surprise_is_found_where_it_is_and_nowhere_else() {
        let polling = [("halt_poll_ns", "200us")];
        let calm = [
            ("exits_halt_per_request", 1.0),
            ("polled_per_request", 0.9),
            ("invalid_per_request", 0.0),
            ("interrupts_per_request", 1.0),
            ("preemptions_per_s", 1.0),
        ];
        assert!(found(&polling, &calm, None).is_empty());
        let with = |name: &str, value: f64| {
            let figures = calm.map(|(known, was)| (known, if known == name { value } else { was }));
            let found = found(&polling, &figures, None);
            assert_eq!(found.len(), 1, "{name}: {found:?}");
            found.concat()
        };
        assert!(with("polled_per_request", 0.0).starts_with("the host may poll"));
        assert!(with("invalid_per_request", 0.5).contains("one in ten"));
        assert!(with("preemptions_per_s", 100.0).contains("took the CPU"));
        assert!(with("exits_halt_per_request", 2.0).contains("1.5 halts"));
        let note = "vcpu0: the guest switched host polling off (MSR_KVM_POLL_CONTROL)";
        let switched = found(&polling, &[], Some(note));
        assert!(switched.concat().contains("changes nothing") && switched.len() == 1);
        assert!(found(&[("halt_poll_ns", "0")], &[], Some(note)).is_empty());
    }
}
