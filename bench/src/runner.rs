//! The bench: runs what is scheduled, keeps what it came to, and makes the reports of it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use halt_poll::recording::{Halt, Recording};
use serde_json::Value as Json;

use crate::advise::{self, Goal};
use crate::choose::{self, Scout};
use crate::guest::{Failure, Guest};
use crate::lines::Interrupt;
use crate::peer::Peer;
use crate::plan::{Plan, Workload};
use crate::progress::Progress;
use crate::results::{Noise, Results, Row, Run, SCHEMA};
use crate::schedule::{self, Job, Subject};
use crate::setting::Setting;
use crate::subject::{self, Machine};
use crate::{Error, analysis, figures, report, surprises};

/// So many failed runs in a row end the bench.
const MAX_FAILED: u32 = 3;
/// Points of a window over time.
const MAX_WINDOWS: usize = 600;
/// The document in the directory of the results.
pub const DOCUMENT: &str = "results.json";
/// The other reports.
const TABLE: &str = "results.csv";
const PAGE: &str = "report.html";

/// What is asked for.
pub struct Options {
    /// The plan.
    pub plan: Plan,
    /// Its name.
    pub name: String,
    /// The guest.
    pub machine: Machine,
    /// Where the results go.
    pub out: PathBuf,
    /// Go on with what is there.
    pub resume: bool,
    /// Record the halts of the first repeat, for the window over time.
    pub record: bool,
    /// Other monitors that are to run the same.
    pub peers: Vec<Peer>,
    /// What to give advice on.
    pub goal: Option<Goal>,
    /// The words that the user typed.
    pub command: Vec<String>,
}

/// Says what a `pollux run` with these words would do: its configuration, or one line why it would not.
pub type Resolve<'a> = &'a dyn Fn(&[String]) -> Result<Json, String>;

/// How a bench ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything was run.
    Complete,
    /// The user wanted an end.
    Interrupted,
}

/// A run in a boot that is recorded.
struct Recorded {
    job: Job,
    /// When its workload ran, in nanoseconds since the VM was assembled.
    span_ns: [u64; 2],
    requests: f64,
}

/// A bench in progress.
pub struct Bench<'a> {
    options: &'a Options,
    settings: Vec<Setting>,
    /// Of each setting, by workload and setting: the configuration that Pollux makes of it.
    configs: Vec<Vec<Json>>,
    /// What there is so far.
    pub results: Results,
    /// The halts of settings that do not poll, with their number of requests, by workload and setting.
    scouts: BTreeMap<(usize, usize), (Recording, f64)>,
    /// Runs that failed one after the other.
    failed: u32,
    interrupt: &'a Interrupt,
}

impl<'a> Bench<'a> {
    /// Checks everything that can be checked before a guest runs.
    ///
    /// # Errors
    /// What is wrong with the options or the plan, or there are results already.
    pub fn new(
        options: &'a Options,
        resolve: Resolve<'_>,
        interrupt: &'a Interrupt,
    ) -> Result<Self, Error> {
        let Options { plan, machine, .. } = options;
        let settings = plan.settings();
        let config = |workload: &Workload, setting: &Setting| {
            let words = machine.agent(workload, setting, &plan.measure);
            // Without the program and `run`.
            resolve(words.get(2..).unwrap_or_default()).map_err(|why| {
                Error::Usage(format!("workload {}, setting {setting}: {why}", workload.name))
            })
        };
        let configs = plan
            .workloads
            .iter()
            .map(|workload| settings.iter().map(|setting| config(workload, setting)).collect())
            .collect::<Result<Vec<Vec<_>>, _>>()?;
        let mut bench = Self {
            options,
            settings,
            configs,
            results: new_results(options),
            scouts: BTreeMap::new(),
            failed: 0,
            interrupt,
        };
        bench.results.rows = bench.rows();
        let twin = |workload: &Workload| Noise {
            workload: workload.name.clone(),
            relative: BTreeMap::new(),
            runs: Vec::new(),
        };
        bench.results.noise = plan.workloads.iter().map(twin).collect();
        bench.take_up_results()?;
        Ok(bench)
    }

    /// Of each workload, a row a setting, then a row a peer.
    fn rows(&self) -> Vec<Row> {
        let Options { plan, machine, peers, .. } = self.options;
        let row = |workload: &Workload, monitor: &str, setting: &Setting, command| Row {
            id: match monitor {
                "pollux" => format!("{}: {setting}", workload.name),
                monitor => format!("{}: {monitor} {setting}", workload.name).trim_end().to_owned(),
            },
            workload: workload.name.clone(),
            monitor: monitor.into(),
            setting: setting.0.clone(),
            command,
            guest_command: subject::steps(workload, &plan.measure).join("; "),
            skipped: None,
            runs: Vec::new(),
            summary: BTreeMap::new(),
            against_base: BTreeMap::new(),
            dominated_by: None,
            window_us: Vec::new(),
        };
        let mut rows = Vec::new();
        for (number, workload) in plan.workloads.iter().enumerate() {
            for setting in &self.settings {
                let command = machine.by_hand(workload, setting, &plan.measure);
                rows.push(row(workload, "pollux", setting, command));
            }
            for peer in peers {
                let idle = self.idle(number);
                let (words, _) =
                    peer.command(machine, workload, &plan.measure, &idle, Path::new("."));
                rows.push(row(workload, peer.name(), &peer.setting(), words));
            }
        }
        rows
    }

    /// How the guests of peers idle: as that of the workload's first setting.
    fn idle(&self, workload: usize) -> Vec<String> {
        let config = self.configs.get(workload).and_then(|configs| configs.first());
        config.map(advise::guest_cmdline).unwrap_or_default()
    }

    /// Rows of a workload.
    fn rows_a_workload(&self) -> usize {
        self.settings.len() + self.options.peers.len()
    }

    /// Takes over the runs of an earlier bench that was asked for the same.
    fn take_up_results(&mut self) -> Result<(), Error> {
        let Options { out, resume, .. } = self.options;
        let path = out.join(DOCUMENT);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(why) => return Err(Error::Usage(format!("{}: {why}", path.display()))),
        };
        let wrong = |why: &str| Error::Usage(format!("--out {}: {why}", out.display()));
        if !resume {
            return Err(wrong("there are results already (use --resume, or another directory)"));
        }
        let earlier: Results = serde_json::from_str(&text)
            .map_err(|why| wrong(&format!("its {DOCUMENT} is none: {why}")))?;
        let same = earlier.schema == SCHEMA
            && earlier.plan == self.results.plan
            && earlier.rows.iter().map(|row| &row.id).eq(self
                .results
                .rows
                .iter()
                .map(|row| &row.id));
        if !same {
            return Err(wrong("its results are of another plan (use another directory)"));
        }
        self.results = Results { ended: None, ..earlier };
        let again = |runs: &mut Vec<Run>| runs.retain(|run| run.error.is_none());
        self.results.rows.iter_mut().for_each(|row| again(&mut row.runs));
        self.results.noise.iter_mut().for_each(|noise| again(&mut noise.runs));
        Ok(())
    }

    /// The runs of what a job measures.
    fn runs(&mut self, job: &Job) -> Option<&mut Vec<Run>> {
        let index = match job.subject {
            Subject::Twin => return Some(&mut self.results.noise.get_mut(job.workload)?.runs),
            Subject::Setting(index) => index,
            Subject::Peer(index) => self.settings.len() + index,
        };
        let row = job.workload * self.rows_a_workload() + index;
        Some(&mut self.results.rows.get_mut(row)?.runs)
    }

    fn is_done(&mut self, job: &Job) -> bool {
        self.runs(job).is_none_or(|runs| runs.iter().any(|run| run.repeat == job.repeat))
    }

    /// Runs all that is not done yet. Where advice is wanted, the settings that do not poll come first, and
    /// what replaying their halts predicts to be beaten is not run.
    ///
    /// # Errors
    /// Guests do not run at all, or the results cannot be written.
    pub fn run(&mut self, progress: &Progress) -> Result<End, Error> {
        let peers = self.options.peers.len();
        let mut boots = schedule::boots(&self.options.plan, &self.settings, peers);
        let is_chosen = self.results.rows.iter().any(|row| row.skipped.is_some());
        if self.options.goal.is_some() && !is_chosen {
            let mut scouts = boots.clone();
            scouts.iter_mut().for_each(|jobs| jobs.retain(|job| self.is_scout(job)));
            if let End::Interrupted = self.run_boots(scouts, progress)? {
                return Ok(End::Interrupted);
            }
            self.choose(progress);
        }
        boots.iter_mut().for_each(|jobs| {
            jobs.retain(|job| self.row(job).is_none_or(|row| row.skipped.is_none()));
        });
        let end = self.run_boots(boots, progress)?;
        if end == End::Complete {
            self.results.ended = Some(now());
        }
        self.save()?;
        Ok(end)
    }

    /// The row that a job adds to; a twin has none.
    fn row(&self, job: &Job) -> Option<&Row> {
        let index = match job.subject {
            Subject::Twin => return None,
            Subject::Setting(index) => index,
            Subject::Peer(index) => self.settings.len() + index,
        };
        self.results.rows.get(job.workload * self.rows_a_workload() + index)
    }

    fn is_scout(&self, job: &Job) -> bool {
        match job.subject {
            Subject::Setting(index) => {
                job.repeat == 0 && self.settings.get(index).is_some_and(choose::is_scout)
            }
            _ => false,
        }
    }

    /// Predicts what the scouts' halts say of the other settings, and marks those that are not to be
    /// measured.
    fn choose(&mut self, progress: &Progress) {
        let rows = self.rows_a_workload();
        let mut skipped = 0;
        for workload in 0..self.options.plan.workloads.len() {
            let mut predicted = Vec::new();
            for (index, setting) in self.settings.iter().enumerate() {
                let known = self.scouts.iter().find(|((of, scout), _)| {
                    *of == workload
                        && self
                            .settings
                            .get(*scout)
                            .is_some_and(|scout| choose::fits(scout, setting))
                });
                let Some(((_, scout), (recording, requests))) = known else { continue };
                if *scout == index {
                    continue;
                }
                let row = self.results.rows.get(workload * rows + scout);
                let figure = |name: &str| Some(row?.summary.get(name)?.median);
                let scout = self
                    .settings
                    .get(*scout)
                    .zip(figure("lat_mean_us"))
                    .zip(figure("host_us_per_request"));
                let Some(((setting, latency_us), cost_us)) = scout else { continue };
                let scout = Scout { setting, recording, requests: *requests, latency_us, cost_us };
                let config = self.configs.get(workload).and_then(|configs| configs.get(index));
                if let Some(prediction) = config.and_then(|config| choose::predict(&scout, config))
                {
                    predicted.push((index, prediction));
                }
            }
            let chosen = choose::choose(&predicted);
            for (index, prediction) in
                predicted.iter().filter(|(index, _)| *index > 0 && !chosen.contains(index))
            {
                if let Some(row) = self.results.rows.get_mut(workload * rows + index) {
                    row.skipped = Some(format!(
                        "replay predicts {:.0} us mean latency for {:.0} us of CPU a request, which others beat",
                        prediction.latency_us, prediction.cost_us
                    ));
                    skipped += 1;
                }
            }
        }
        if skipped > 0 {
            progress.line(&format!(
                "replay: {skipped} settings are predicted to be beaten, and not measured"
            ));
        }
    }

    /// Runs what is not done yet of these.
    fn run_boots(&mut self, mut boots: Vec<Vec<Job>>, progress: &Progress) -> Result<End, Error> {
        boots.iter_mut().for_each(|jobs| jobs.retain(|job| !self.is_done(job)));
        boots.retain(|jobs| !jobs.is_empty());
        progress.start(boots.iter().map(Vec::len).sum());
        let mut number = self.boots_so_far();
        for jobs in boots {
            let mut left = jobs.as_slice();
            while let Some(first) = left.first() {
                let (done, failure) = self.boot(left, number, progress);
                number += 1;
                left = left.get(done..).unwrap_or_default();
                match failure {
                    None => {}
                    Some(Failure::Interrupted) => return Ok(End::Interrupted),
                    // A guest that fails takes one run with it: the rest has another guest.
                    Some(Failure::Failed(why)) => {
                        let job = left.first().unwrap_or(first);
                        self.keep(job, failed_run(job.repeat, number - 1, &why), progress)?;
                        left = left.get(1..).unwrap_or_default();
                    }
                }
            }
        }
        Ok(End::Complete)
    }

    fn boots_so_far(&self) -> u32 {
        let rows = self.results.rows.iter().flat_map(|row| &row.runs);
        let twins = self.results.noise.iter().flat_map(|noise| &noise.runs);
        rows.chain(twins).map(|run| run.boot + 1).max().unwrap_or(0)
    }

    /// One boot, and its jobs: how many of them were done, and why not all.
    fn boot(&mut self, jobs: &[Job], number: u32, progress: &Progress) -> (usize, Option<Failure>) {
        let mut done = 0;
        let mut run = || {
            let Some(first) = jobs.first() else { return Ok(()) };
            let Options { plan, machine, .. } = self.options;
            let (workload, setting, _) = self.subject(first)?;
            if let Subject::Peer(index) = first.subject {
                let run = self.run_peer(first, index, number, progress)?;
                self.keep(first, run, progress).map_err(|why| why.to_string())?;
                done += 1;
                return Ok(());
            }
            let mut words = machine.agent(workload, setting, &plan.measure);
            let is_scout = self.options.goal.is_some() && self.is_scout(first);
            let recording = (is_scout || (self.options.record && first.repeat == 0))
                .then(|| tempfile::NamedTempFile::new().map_err(|why| format!("--record: {why}")))
                .transpose()?;
            if let Some(file) = &recording {
                words.extend(["--record".into(), file.path().display().to_string()]);
            }
            progress.tell(&format!("booting: {setting}"));
            let mut recorded = Vec::new();
            let mut guest = Guest::boot(&words, self.interrupt)?;
            if self.results.guest.is_null() {
                self.results.guest = guest.itself.clone();
            }
            for job in jobs {
                let (run, of) = self.measure(&mut guest, job, number, progress)?;
                recorded.extend(of);
                self.keep(job, run, progress).map_err(|why| why.to_string())?;
                done += 1;
            }
            guest.stop();
            if let Some(file) = recording {
                self.take_recording(file.path(), recorded)?;
            }
            Ok(())
        };
        let failure = run().err();
        (done, failure)
    }

    /// Takes from a boot's recording what belongs to its runs.
    fn take_recording(&mut self, path: &Path, recorded: Vec<Recorded>) -> Result<(), Failure> {
        let whole =
            Recording::read(path).map_err(|why| format!("the recording of halts: {why}"))?;
        for Recorded { job, span_ns: [from_ns, until_ns], requests } in recorded {
            let Subject::Setting(index) = job.subject else { continue };
            let part = whole.clone().between(from_ns, until_ns);
            let row = job.workload * self.rows_a_workload() + index;
            if let Some(row) = self.results.rows.get_mut(row) {
                row.window_us = windows(&part, from_ns);
            }
            if choose::is_scout(self.settings.get(index).unwrap_or(&Setting::default())) {
                self.scouts.insert((job.workload, index), (part, requests));
            }
        }
        self.save().map_err(|why| Failure::Failed(why.to_string()))
    }

    fn run_peer(
        &self,
        job: &Job,
        index: usize,
        boot: u32,
        progress: &Progress,
    ) -> Result<Run, Failure> {
        let Options { plan, machine, peers, .. } = self.options;
        let peer = peers.get(index).ok_or_else(|| "no such peer".to_owned())?;
        let (workload, ..) = self.subject(job)?;
        progress.tell(&format!("{}: {}", workload.name, peer.name()));
        let idle = self.idle(job.workload);
        peer.run(machine, workload, &plan.measure, &idle, [job.repeat, boot], self.interrupt)
    }

    fn subject(&self, job: &Job) -> Result<(&'a Workload, &Setting, &Json), Failure> {
        let index = match job.subject {
            Subject::Setting(index) => index,
            Subject::Twin | Subject::Peer(_) => 0,
        };
        let workload = self.options.plan.workloads.get(job.workload);
        let config = self.configs.get(job.workload).and_then(|configs| configs.get(index));
        match (workload, self.settings.get(index), config) {
            (Some(workload), Some(setting), Some(config)) => Ok((workload, setting, config)),
            _ => Err("no such job".to_owned().into()),
        }
    }

    /// What Pollux makes of a row.
    fn config(&self, row: &Row) -> Option<&Json> {
        let at = self.results.rows.iter().position(|found| found.id == row.id)?;
        let rows = self.rows_a_workload().max(1);
        self.configs.get(at / rows)?.get(at % rows)
    }

    fn measure(
        &mut self,
        guest: &mut Guest<'_>,
        job: &Job,
        boot: u32,
        progress: &Progress,
    ) -> Result<(Run, Option<Recorded>), Failure> {
        let measure = &self.options.plan.measure;
        let (workload, setting, config) = self.subject(job)?;
        progress.tell(&format!("{}: {setting}", workload.name));
        guest.set(setting, config)?;
        let seconds = workload.seconds(measure) + measure.warmup_seconds + measure.idle_seconds;
        let mut reports = figures::Reports::new();
        for step in subject::steps(workload, measure) {
            reports.extend(guest.tell(&step, Duration::from_secs_f64(seconds))?);
        }
        let document = guest.statistics()?;
        let figures = figures::of_pollux(workload.kind, &document, &reports)?;
        if self.results.host.is_null() {
            self.results.host = document["host"].clone();
        }
        let recorded = figures::span_ns(workload.kind, &document).map(|span_ns| Recorded {
            job: *job,
            span_ns,
            requests: figures::requests(workload.kind, &document, &reports).unwrap_or(0.0),
        });
        let notes = document["notes"].as_array().into_iter().flatten();
        let run = Run {
            repeat: job.repeat,
            boot,
            error: None,
            figures,
            latency_us: figures::distribution(&reports),
            notes: notes.filter_map(|note| note.as_str().map(str::to_owned)).collect(),
        };
        Ok((run, recorded))
    }

    /// Keeps a run, and what there is, on the disk.
    fn keep(&mut self, job: &Job, run: Run, progress: &Progress) -> Result<(), Error> {
        let what = match (self.subject(job), job.subject) {
            (Ok((workload, ..)), Subject::Peer(index)) => {
                let peer = self.options.peers.get(index);
                let peer = peer.map(|peer| format!("{} {}", peer.name(), peer.setting()));
                format!("{}: {}", workload.name, peer.unwrap_or_default())
            }
            (Ok((workload, setting, _)), _) => format!("{}: {setting}", workload.name),
            (Err(_), _) => String::new(),
        };
        let again = if job.subject == Subject::Twin { " (again, for the noise)" } else { "" };
        progress.done(&format!("{what}{again}: {}", in_short(&run)));
        let failure = run.error.clone();
        if let Some(runs) = self.runs(job) {
            runs.push(run);
        }
        self.save()?;
        self.failed = if failure.is_some() { self.failed + 1 } else { 0 };
        match failure {
            Some(why) if self.failed >= MAX_FAILED => {
                Err(Error::Failed(format!("{MAX_FAILED} runs in a row failed: {why}")))
            }
            _ => Ok(()),
        }
    }

    /// Writes the document; what was there is replaced as a whole.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save(&mut self) -> Result<(), Error> {
        analysis::work_out(&mut self.results);
        self.results.notes = surprises::find(&self.results);
        if let Some(goal) = &self.options.goal {
            self.results.advice =
                advise::advise(&self.results, goal, &|row| self.config(row).cloned());
        }
        let text = serde_json::to_string_pretty(&self.results)
            .map_err(|why| Error::Failed(format!("{DOCUMENT}: {why}")))?;
        write(&self.options.out, DOCUMENT, &text)
    }
}

/// Everything that people read, made of the document: in the directory the files, and the text for the
/// terminal.
///
/// # Errors
/// A file cannot be written.
pub fn report(results: &Results, out: &Path) -> Result<String, Error> {
    let table =
        report::csv::render(results).map_err(|why| Error::Failed(format!("{TABLE}: {why}")))?;
    write(out, TABLE, &table)?;
    write(out, PAGE, &report::html::render(results))?;
    Ok(report::terminal::render(results))
}

/// Writes a file into the directory of the results, which is made if it is not there; a file is replaced
/// as a whole.
///
/// # Errors
/// It cannot be written.
pub fn write(out: &Path, name: &str, text: &str) -> Result<(), Error> {
    let path = out.join(name);
    let write = || {
        fs::create_dir_all(out)?;
        let mut file = tempfile::NamedTempFile::new_in(out)?;
        file.write_all(text.as_bytes())?;
        // Readable as other files are, unlike a temporary one.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(mode)?;
        file.persist(&path).map_err(|why| why.error)
    };
    write().map(drop).map_err(|why| Error::Failed(format!("{}: {why}", path.display())))
}

fn new_results(options: &Options) -> Results {
    Results {
        schema: SCHEMA,
        command: options.command.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        started: now(),
        ended: None,
        plan: options.plan.to_toml(),
        name: options.name.clone(),
        question: options.plan.question.clone(),
        host: Json::Null,
        guest: Json::Null,
        rows: Vec::new(),
        noise: Vec::new(),
        advice: Vec::new(),
        notes: Vec::new(),
    }
}

/// The first vCPU's window over time, in seconds since `from_ns` and microseconds: where it changed, at
/// most [`MAX_WINDOWS`] points.
fn windows(recording: &Recording, from_ns: u64) -> Vec<[f64; 2]> {
    let halts = recording.vcpus.first().map(Vec::as_slice).unwrap_or_default();
    let point = |halt: &Halt| {
        [halt.start_ns.saturating_sub(from_ns) as f64 / 1e9, f64::from(halt.window_ns) / 1e3]
    };
    let mut last = None;
    let mut changes: Vec<[f64; 2]> = halts
        .iter()
        .filter(|halt| last.replace(halt.window_ns) != Some(halt.window_ns))
        .map(point)
        .collect();
    changes.extend(halts.last().map(point));
    let step = changes.len().div_ceil(MAX_WINDOWS).max(1);
    changes.into_iter().step_by(step).collect()
}

fn failed_run(repeat: u32, boot: u32, why: &str) -> Run {
    Run {
        repeat,
        boot,
        error: Some(why.to_owned()),
        figures: BTreeMap::new(),
        latency_us: Vec::new(),
        notes: Vec::new(),
    }
}

fn in_short(run: &Run) -> String {
    let figure = |name: &str| run.figures.get(name).copied().unwrap_or(f64::NAN);
    match &run.error {
        Some(why) => format!("failed: {why}"),
        None => format!(
            "{:.0} a second, mean {:.1} us, CPU {:.1} us a request",
            figure("iops"),
            figure("lat_mean_us"),
            figure("host_us_per_request")
        ),
    }
}

/// RFC 3339, UTC.
fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
