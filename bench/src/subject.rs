//! The commands of a bench: what runs a setting under Pollux, for the bench and for who repeats it.

use std::path::PathBuf;

use crate::guest::AGENT;
use crate::plan::{Measure, Workload};
use crate::setting::Setting;

/// The guest that all settings are measured in.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The program `pollux`.
    pub pollux: String,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Its root file system, which is not written to.
    pub root: PathBuf,
    /// The disk that is read and written.
    pub data: PathBuf,
    /// Options of `pollux run` that all settings have.
    pub options: Vec<String>,
}

impl Machine {
    /// `pollux run` for a setting, without where it reports to. `command_line`: the guest's.
    fn pollux(
        &self,
        workload: &Workload,
        setting: &Setting,
        measure: &Measure,
        command_line: &str,
    ) -> Vec<String> {
        let text = |path: &PathBuf| path.display().to_string();
        // A comma in a value is written twice.
        let in_disk = |path: &PathBuf| text(path).replace(',', ",,");
        let mut words =
            vec![self.pollux.clone(), "run".into(), "--kernel".into(), text(&self.kernel)];
        if let Some(initrd) = &self.initrd {
            words.extend(["--initrd".into(), text(initrd)]);
        }
        let disks = [
            format!("path={},readonly=on", in_disk(&self.root)),
            format!(
                "path={},queues={}{}",
                in_disk(&self.data),
                workload.queues,
                setting.disk_options()
            ),
        ];
        for disk in disks {
            words.extend(["--disk".into(), disk]);
        }
        let (cpus, memory) = (workload.cpus.to_string(), measure.memory.clone());
        words.extend(["--cpus".into(), cpus, "--memory".into(), memory]);
        words.extend(setting.options());
        words.extend(self.options.iter().cloned());
        words.extend(["--cmdline".into(), command_line.into()]);
        words
    }

    /// For a guest that is told what to do.
    pub fn agent(&self, workload: &Workload, setting: &Setting, measure: &Measure) -> Vec<String> {
        self.pollux(workload, setting, measure, AGENT)
    }

    /// For who repeats one run by hand: the guest does it and powers off.
    pub fn by_hand(
        &self,
        workload: &Workload,
        setting: &Setting,
        measure: &Measure,
    ) -> Vec<String> {
        let command_line =
            format!("quiet pollux.cmd=\"report; {}\"", steps(workload, measure).join("; "));
        let mut words = self.pollux(workload, setting, measure, &command_line);
        words.extend(
            ["--console", "off", "--results", "/dev/stderr", "--stats", "-"].map(str::to_owned),
        );
        words
    }
}

/// What is done in a guest for one run, in order: the warm-up, the workload, idling.
pub fn steps(workload: &Workload, measure: &Measure) -> Vec<String> {
    let mut steps = Vec::new();
    if measure.warmup_seconds > 0.0 {
        steps.push(format!("{} >/dev/null", workload.command(measure.warmup_seconds)));
    }
    steps.push(workload.command(workload.seconds(measure)));
    if measure.idle_seconds > 0.0 {
        steps.push(format!("idle-measure {}", measure.idle_seconds));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    #[test]
    fn a_setting_is_one_command() {
        let plan = Plan::parse(
            "[[workload]]\nname = \"w\"\nqueues = 2\ncpus = 3\nrw = \"randrw\"\niodepth = 4\n\
             [[sweep]]\nhalt = \"user\"\npacked = true\nhalt_poll_ns = \"5us\"",
            "p",
        )
        .unwrap();
        let machine = Machine {
            pollux: "pollux".into(),
            kernel: "k".into(),
            initrd: Some("i".into()),
            root: "r,oot".into(),
            data: "d".into(),
            options: vec!["--pin".into(), "vcpu0=1".into()],
        };
        let (workload, setting) = (&plan.workloads[0], &plan.settings()[0]);
        let words = machine.by_hand(workload, setting, &plan.measure).join(" ");
        assert_eq!(
            words,
            "pollux run --kernel k --initrd i --disk path=r,,oot,readonly=on --disk \
             path=d,queues=2,packed=on --cpus 3 --memory 512M --halt user --halt-poll-ns 5us \
             --pin vcpu0=1 --cmdline quiet pollux.cmd=\"report; fio-measure 1 /dev/vdb rw=randrw \
             bs=4k ioengine=libaio iodepth=4 numjobs=1 >/dev/null; fio-measure 4 /dev/vdb rw=randrw \
             bs=4k ioengine=libaio iodepth=4 numjobs=1; idle-measure 1\" --console off --results \
             /dev/stderr --stats -"
        );
        let words = machine.agent(workload, setting, &plan.measure).join(" ");
        assert!(words.ends_with("--cmdline quiet pollux.cmd=\"report; agent\""), "{words}");
    }
}
