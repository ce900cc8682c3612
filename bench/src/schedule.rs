//! What is run when: all settings in turn, again and again, and which of them share a boot.

use crate::plan::{Boots, Plan};
use crate::setting::Setting;

/// Most runs of one boot: the statistics keep a bounded number of marks.
const MAX_RUNS_A_BOOT: usize = 30;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A setting, by its number.
    Setting(usize),
    /// The first setting once more, to see how much equal settings differ.
    Twin,
    /// Another monitor, by its number.
    Peer(usize),
}

/// One run that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// The workload, by its number.
    pub workload: usize,
    /// What is measured.
    pub subject: Subject,
    /// Which of the repeats.
    pub repeat: u32,
}

/// All runs in their order; those in one list share a boot. Every repeat has each subject of each
/// workload once, in boots of its own.
pub fn boots(plan: &Plan, settings: &[Setting], peers: usize) -> Vec<Vec<Job>> {
    let mut all = Vec::new();
    for repeat in 0..plan.measure.repeats {
        let mut boots: Vec<(Vec<String>, Vec<Job>)> = Vec::new();
        for (number, workload) in plan.workloads.iter().enumerate() {
            let machine = format!("cpus={} queues={}", workload.cpus, workload.queues);
            for (index, setting) in settings.iter().enumerate() {
                let job = Job { workload: number, subject: Subject::Setting(index), repeat };
                let mut key = setting.boot_key();
                key.push(machine.clone());
                let shared = boots.iter_mut().find(|(found, jobs)| {
                    plan.measure.boots == Boots::Shared
                        && *found == key
                        && jobs.len() < MAX_RUNS_A_BOOT
                });
                match shared {
                    Some((_, jobs)) => jobs.push(job),
                    None => boots.push((key, vec![job])),
                }
            }
        }
        all.extend(boots.into_iter().map(|(_, jobs)| jobs));
        for workload in 0..plan.workloads.len() {
            let others = (0..peers).map(Subject::Peer);
            // Last, as far from its twin as can be: what drifts is noise as well.
            for subject in others.chain([Subject::Twin]) {
                all.push(vec![Job { workload, subject, repeat }]);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Plan {
        Plan::parse(text, "p").unwrap()
    }

    #[test]
    fn every_repeat_has_each_setting_once_and_then_the_twin() {
        let plan = plan(
            "measure.repeats = 2\n[[workload]]\nname = \"a\"\n[[workload]]\nname = \"b\"\ncpus = 2\n\
             [[sweep]]\nhalt = [\"kernel\", \"user\"]\nhalt_poll_ns = [0, 5]\n",
        );
        let settings = plan.settings();
        let boots = boots(&plan, &settings, 1);
        // Two workloads of different machines, two modes; then for each workload a peer and a twin.
        let sizes: Vec<usize> = boots.iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 2, 2, 2, 1, 1, 1, 1].repeat(2));
        for repeat in 0..2 {
            for workload in 0..2 {
                let subjects: Vec<Subject> = boots
                    .iter()
                    .flatten()
                    .filter(|job| job.repeat == repeat && job.workload == workload)
                    .map(|job| job.subject)
                    .collect();
                let mut expected: Vec<_> = (0..4).map(Subject::Setting).collect();
                expected.extend([Subject::Peer(0), Subject::Twin]);
                assert_eq!(subjects, expected);
            }
        }
        // Two workloads of one machine share boots, too; with a boot each nothing does.
        let shared = boots
            .iter()
            .take(4)
            .all(|boot| boot.windows(2).all(|pair| pair[0].workload == pair[1].workload));
        assert!(shared);
    }

    #[test]
    fn a_boot_each_is_a_boot_each_and_no_boot_is_too_long() {
        let text = "measure.repeats = 1\nmeasure.boots = \"each\"\n[[workload]]\nname = \"a\"\n\
                    [[sweep]]\nhalt_poll_ns = [0, 5, 6]\n";
        let each = plan(text);
        assert_eq!(boots(&each, &each.settings(), 0).len(), 4);
        let values: Vec<String> = (1..=70).map(|n| n.to_string()).collect();
        let text = text.replace("each", "shared").replace("0, 5, 6", &values.join(", "));
        let shared = plan(&text);
        let sizes: Vec<_> = boots(&shared, &shared.settings(), 0).iter().map(Vec::len).collect();
        assert_eq!(sizes, [30, 30, 10, 1]);
    }
}
