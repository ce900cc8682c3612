//! `pollux replay`: what the options mean, and how the predictions are shown. They are made by
//! [`halt_poll::replay`].

use std::fmt::Write as _;
use std::io::{self, Write};
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use halt_poll::recording::{Mode, Recording, Source};
use halt_poll::replay::{Prediction, simulate, total};
use halt_poll::{Params, guest};
use serde_json::{Value as Json, json};

use crate::cli::ReplayArgs;
use crate::config::{ConfigError, long_time_ns, number, switch, time_ns};

/// More combinations of parameters than these are a slip of the hand.
const SETTINGS_MAX: usize = 1_000_000;

/// Parameters of both sides. `guest`: those of its haltpoll governor, if it is to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    host: Params,
    guest: Option<guest::Params>,
}

/// What is predicted for a setting.
struct Row {
    setting: Setting,
    vcpus: Vec<Prediction>,
    total: Prediction,
}

/// Where the cost of waking is from.
#[derive(Clone, Copy)]
enum WakeCost {
    Asked(u32),
    Recorded(u32),
}

impl WakeCost {
    fn ns(self) -> u32 {
        match self {
            Self::Asked(ns) | Self::Recorded(ns) => ns,
        }
    }
}

/// Prints what is predicted.
///
/// # Errors
/// An option is wrong, or the file cannot be replayed.
pub fn run(args: &ReplayArgs) -> Result<(), ConfigError> {
    let from_ns = long_time_ns("--from", &args.from)?;
    let until_ns =
        args.until.as_deref().map_or(Ok(u64::MAX), |text| long_time_ns("--until", text))?;
    let asked = args.wake_cost_ns.as_deref().map(|text| time_ns("--wake-cost-ns", text));
    let asked = asked.transpose()?;
    // What is wrong with the options is told before a long file is read; the defaults come with it.
    settings(args, Params::default())?;

    let wrong = |problem: String| ConfigError::new("FILE", args.file.display(), problem);
    let recording = Recording::read(&args.file).map_err(|why| match why {
        halt_poll::recording::ReadError::Io(error) => wrong(crate::config::reason(&error)),
        other => wrong(other.to_string()).hint("name a file of pollux run --record"),
    })?;
    let all = recording.halts();
    let recording = recording.between(from_ns, until_ns);
    check(&recording, all).map_err(|(problem, hint)| wrong(problem).hint(hint))?;
    let wake_cost = match (asked, recording.wake_cost_ns()) {
        (Some(ns), _) => WakeCost::Asked(ns),
        (None, Some(ns)) => WakeCost::Recorded(ns),
        (None, None) => {
            let problem = "has no halt that slept and tells what waking it cost";
            return Err(wrong(problem.into()).hint("give it, as --wake-cost-ns 50us"));
        }
    };
    let settings = settings(args, recording.header.host)?;
    let start = Instant::now();
    let mut rows = predict(&recording, &settings, wake_cost.ns());
    let took = start.elapsed();
    rows.sort_by_key(|row| (row.total.added_latency_ns, row.total.polled_ns()));
    let text = if args.json {
        format!("{:#}\n", document(&recording, wake_cost, &rows))
    } else {
        table(&recording, wake_cost, &rows, took)
    };
    // Nobody to read it is no error of ours.
    let _ = io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Whether predictions can be made from it: if not, why, and what to do. `all`: halts of the whole file.
fn check(recording: &Recording, all: usize) -> Result<(), (String, &'static str)> {
    let halts = recording.halts();
    if halts == 0 {
        let problem = if all == 0 { "has no halts" } else { "has no halts in that time" };
        return Err((problem.into(), "record a guest that idles, or choose another time"));
    }
    let short = recording.after_guest_polling();
    if short > 0 {
        let problem = format!(
            "{short} of {halts} halts came after the guest had polled by itself, and how long it was \
             idle before is not recorded"
        );
        let hint = "record with --guest-idle halt, or choose a time before with --until";
        return Err((problem, hint));
    }
    Ok(())
}

/// All combinations of the values that are asked for. `recorded`: what the host's parameters were.
fn settings(args: &ReplayArgs, recorded: Params) -> Result<Vec<Setting>, ConfigError> {
    let hosts = [
        list("--halt-poll-ns", &args.halt_poll_ns, recorded.max_ns, time_ns)?,
        list("--halt-poll-ns-grow", &args.halt_poll_ns_grow, recorded.grow, number)?,
        list(
            "--halt-poll-ns-grow-start",
            &args.halt_poll_ns_grow_start,
            recorded.grow_start_ns,
            time_ns,
        )?,
        list("--halt-poll-ns-shrink", &args.halt_poll_ns_shrink, recorded.shrink, number)?,
    ];
    let default = guest::Params::default();
    let off_or_time = |option, text: &str| match text {
        "off" => Ok(None),
        text => time_ns(option, text).map(Some),
    };
    let grow = list("--guest-halt-poll-grow", &args.guest_halt_poll_grow, 2, number)?;
    let start = list(
        "--guest-halt-poll-grow-start",
        &args.guest_halt_poll_grow_start,
        default.guest_halt_poll_grow_start,
        time_ns,
    )?;
    let shrink = list("--guest-halt-poll-shrink", &args.guest_halt_poll_shrink, 2, number)?;
    let allow = list(
        "--guest-halt-poll-allow-shrink",
        &args.guest_halt_poll_allow_shrink,
        default.guest_halt_poll_allow_shrink,
        switch,
    )?;
    let others = [
        &args.guest_halt_poll_grow,
        &args.guest_halt_poll_grow_start,
        &args.guest_halt_poll_shrink,
        &args.guest_halt_poll_allow_shrink,
    ];
    let is_asked_for = others.iter().any(|option| option.is_some());
    let max = is_asked_for.then_some(default.guest_halt_poll_ns);
    let max = list("--guest-halt-poll-ns", &args.guest_halt_poll_ns, max, off_or_time)?;

    let guests = [max.len(), grow.len(), start.len(), shrink.len(), allow.len()];
    let lengths = hosts.iter().map(Vec::len).chain(guests);
    let count = lengths.fold(1_usize, usize::saturating_mul);
    if count > SETTINGS_MAX {
        let problem = "is one of so many values that they have more combinations than can be tried";
        let value = args.halt_poll_ns.as_deref().unwrap_or_default();
        return Err(ConfigError::new("--halt-poll-ns", value, problem)
            .hint(format!("use at most {SETTINGS_MAX} combinations")));
    }
    let mut sides = Vec::new();
    for &guest_halt_poll_ns in &max {
        let Some(guest_halt_poll_ns) = guest_halt_poll_ns else {
            sides.push(None);
            continue;
        };
        for &guest_halt_poll_grow in &grow {
            for &guest_halt_poll_grow_start in &start {
                for &guest_halt_poll_shrink in &shrink {
                    for &guest_halt_poll_allow_shrink in &allow {
                        sides.push(Some(guest::Params {
                            guest_halt_poll_ns,
                            guest_halt_poll_grow,
                            guest_halt_poll_grow_start,
                            guest_halt_poll_shrink,
                            guest_halt_poll_allow_shrink,
                        }));
                    }
                }
            }
        }
    }
    let mut settings = Vec::new();
    let [max, grow, start, shrink] = hosts;
    for &max_ns in &max {
        for &grow in &grow {
            for &grow_start_ns in &start {
                for &shrink in &shrink {
                    let host = Params { max_ns, grow, grow_start_ns, shrink };
                    settings.extend(sides.iter().map(|&guest| Setting { host, guest }));
                }
            }
        }
    }
    Ok(settings)
}

/// The values of an option, each of them once; one default without it.
fn list<T: Copy + PartialEq>(
    option: &'static str,
    text: &Option<String>,
    default: T,
    parse: impl Fn(&'static str, &str) -> Result<T, ConfigError>,
) -> Result<Vec<T>, ConfigError> {
    let Some(text) = text else { return Ok(vec![default]) };
    let mut values = Vec::new();
    for word in text.split(',') {
        let value = parse(option, word)?;
        if !values.contains(&value) {
            values.push(value);
        }
    }
    Ok(values)
}

/// Simulates the settings, on all CPUs.
fn predict(recording: &Recording, settings: &[Setting], wake_cost_ns: u32) -> Vec<Row> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let row = |&setting: &Setting| {
        let vcpus = simulate(recording, setting.host, setting.guest, wake_cost_ns);
        let total = total(&vcpus);
        Row { setting, vcpus, total }
    };
    thread::scope(|scope| {
        let share = settings.len().div_ceil(threads).max(1);
        let parts: Vec<_> = settings
            .chunks(share)
            .map(|part| scope.spawn(move || part.iter().map(row).collect::<Vec<_>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap_or_default()).collect()
    })
}

fn mode(recording: &Recording) -> &'static str {
    match recording.header.mode {
        Mode::Kernel => "kernel",
        Mode::User => "user",
    }
}

/// How many halts each source ended, those that ended some.
fn sources(recording: &Recording) -> Vec<(Source, usize)> {
    let of = |source| recording.iter().filter(|halt| halt.source == source).count();
    let counts = Source::ALL.into_iter().map(|source| (source, of(source)));
    counts.filter(|&(_, count)| count > 0).collect()
}

fn table(recording: &Recording, wake_cost: WakeCost, rows: &[Row], took: Duration) -> String {
    let mut text = String::new();
    let halts = recording.halts();
    let woken = sources(recording);
    let woken: Vec<_> =
        woken.iter().map(|(source, count)| format!("{} {count}", source.name())).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{halts} halts of {} vCPUs, recorded with --halt {} and {} ({})",
        recording.vcpus.len(),
        mode(recording),
        host_words(&recording.header.host),
        woken.join(", ")
    );
    if recording.lost > 0 {
        let _ = writeln!(text, "{} more halts were lost", recording.lost);
    }
    if recording.truncated {
        let _ = writeln!(text, "the file ends within a block, as of a run that was killed");
    }
    let _ = match wake_cost {
        WakeCost::Asked(ns) => {
            writeln!(text, "waking a sleeper costs {} where no halt tells", time(ns.into()))
        }
        WakeCost::Recorded(ns) => {
            writeln!(
                text,
                "waking a sleeper costs {}, the median, where no halt tells",
                time(ns.into())
            )
        }
    };
    let _ =
        writeln!(text, "host: halt_poll_ns/grow/grow_start/shrink; guest: the same/allow_shrink\n");
    let _ = writeln!(
        text,
        "{:<22} {:<24} {:>9} {:>7} {:>11} {:>11} {:>14}",
        "host", "guest", "halts", "hits", "host poll", "guest poll", "latency added"
    );
    for Row { setting, total, .. } in rows {
        let guest = setting.guest.as_ref().map_or("off".to_owned(), guest_words);
        let idles = total.idles.max(1);
        let _ = writeln!(
            text,
            "{:<22} {:<24} {:>9} {:>5.1} % {:>11} {:>11} {:>14}",
            host_words(&setting.host),
            guest,
            total.halts,
            total.hits() as f64 * 100.0 / idles as f64,
            time(total.host_polled_ns()),
            time(total.guest_polled_ns()),
            time(total.added_latency_ns / idles),
        );
    }
    let _ = writeln!(
        text,
        "\nhits: idle times that ended while somebody polled; poll: CPU time that took, in all; latency \
         added: by waking, on average"
    );
    let _ = writeln!(text, "{} settings in {:.3} s", rows.len(), took.as_secs_f64());
    text
}

fn host_words(host: &Params) -> String {
    let Params { max_ns, grow, grow_start_ns, shrink } = *host;
    format!("{}/{grow}/{}/{shrink}", time(max_ns.into()), time(grow_start_ns.into()))
}

fn guest_words(guest: &guest::Params) -> String {
    format!(
        "{}/{}/{}/{}/{}",
        time(guest.guest_halt_poll_ns.into()),
        guest.guest_halt_poll_grow,
        time(guest.guest_halt_poll_grow_start.into()),
        guest.guest_halt_poll_shrink,
        if guest.guest_halt_poll_allow_shrink { "on" } else { "off" },
    )
}

/// With the unit that leaves up to four digits before the point.
fn time(ns: u64) -> String {
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")];
    let Some((unit, name)) = units.into_iter().find(|&(unit, _)| ns >= unit) else {
        return format!("{ns}ns");
    };
    if ns.is_multiple_of(unit) {
        format!("{}{name}", ns / unit)
    } else {
        format!("{:.1}{name}", ns as f64 / unit as f64)
    }
}

fn document(recording: &Recording, wake_cost: WakeCost, rows: &[Row]) -> Json {
    let woken: serde_json::Map<String, Json> = sources(recording)
        .into_iter()
        .map(|(source, count)| (source.name().to_owned(), json!(count)))
        .collect();
    let row = |Row { setting, vcpus, total }: &Row| {
        json!({
            "host": host_json(&setting.host),
            "guest": setting.guest.as_ref().map(guest_json),
            "total": prediction_json(total),
            "vcpus": vcpus.iter().map(prediction_json).collect::<Vec<_>>(),
        })
    };
    json!({
        "recording": {
            "halts": recording.halts(),
            "vcpus": recording.vcpus.len(),
            "mode": mode(recording),
            "host": host_json(&recording.header.host),
            "woken_by": woken,
            "lost": recording.lost,
            "truncated": recording.truncated,
        },
        "wake_cost_ns": wake_cost.ns(),
        "wake_cost_is_recorded": matches!(wake_cost, WakeCost::Recorded(_)),
        "predictions": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

fn host_json(host: &Params) -> Json {
    json!({
        "halt_poll_ns": host.max_ns,
        "halt_poll_ns_grow": host.grow,
        "halt_poll_ns_grow_start": host.grow_start_ns,
        "halt_poll_ns_shrink": host.shrink,
    })
}

fn guest_json(guest: &guest::Params) -> Json {
    json!({
        "guest_halt_poll_ns": guest.guest_halt_poll_ns,
        "guest_halt_poll_grow": guest.guest_halt_poll_grow,
        "guest_halt_poll_grow_start": guest.guest_halt_poll_grow_start,
        "guest_halt_poll_shrink": guest.guest_halt_poll_shrink,
        "guest_halt_poll_allow_shrink": guest.guest_halt_poll_allow_shrink,
    })
}

fn prediction_json(prediction: &Prediction) -> Json {
    json!({
        "idles": prediction.idles,
        "guest_attempted_poll": prediction.guest_attempted_poll,
        "guest_successful_poll": prediction.guest_successful_poll,
        "guest_poll_success_ns": prediction.guest_poll_success_ns,
        "guest_poll_fail_ns": prediction.guest_poll_fail_ns,
        "halts": prediction.halts,
        "halt_attempted_poll": prediction.halt_attempted_poll,
        "halt_successful_poll": prediction.halt_successful_poll,
        "halt_poll_success_ns": prediction.halt_poll_success_ns,
        "halt_poll_fail_ns": prediction.halt_poll_fail_ns,
        "halt_wait_ns": prediction.halt_wait_ns,
        "added_latency_ns": prediction.added_latency_ns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command};

    fn args(words: &str) -> ReplayArgs {
        let words = ["pollux", "replay", "f"].into_iter().chain(words.split_whitespace());
        let Command::Replay(args) = cli::parse(words.map(Into::into)).unwrap().command else {
            panic!()
        };
        *args
    }

    fn told(words: &str) -> String {
        settings(&args(words), Params::default()).unwrap_err().to_string()
    }

    #[test]
    fn without_options_there_is_one_setting_which_is_the_recorded_one() {
        let recorded = Params { max_ns: 7, grow: 3, grow_start_ns: 5, shrink: 0 };
        let settings = settings(&args(""), recorded).unwrap();
        assert_eq!(settings, [Setting { host: recorded, guest: None }]);
    }

    #[test]
    fn all_combinations_are_tried_each_once() {
        let words = "--halt-poll-ns 0,10us,10000 --grow 2,4 --grow-start 1us --shrink 0,2 \
                     --guest-halt-poll-ns off,50us,1ms --guest-halt-poll-allow-shrink on,off";
        let settings = settings(&args(words), Params::default()).unwrap();
        // Without the driver its parameters make no difference.
        assert_eq!(settings.len(), 2 * 2 * 2 * (1 + 2 * 2));
        for (index, setting) in settings.iter().enumerate() {
            assert!(!settings[..index].contains(setting), "{setting:?}");
            assert_eq!(setting.host.grow_start_ns, 1_000);
        }
    }

    #[test]
    fn any_parameter_of_the_guests_means_that_it_has_the_driver() {
        let settings = settings(&args("--guest-halt-poll-grow 3"), Params::default()).unwrap();
        let guest = guest::Params { guest_halt_poll_grow: 3, ..guest::Params::default() };
        assert_eq!(settings[0].guest, Some(guest));
    }

    #[test]
    fn values_that_are_none_are_refused_by_their_option() {
        assert!(told("--halt-poll-ns 1us,x").starts_with("--halt-poll-ns x: not a time"));
        assert!(told("--grow 1,").starts_with("--halt-poll-ns-grow \"\": not a number"));
        assert!(told("--guest-halt-poll-ns of").starts_with("--guest-halt-poll-ns of: not a time"));
        assert!(told("--guest-halt-poll-allow-shrink no").contains("on or off"));
        let many: Vec<String> = (0..1001).map(|n| n.to_string()).collect();
        let many = format!("--halt-poll-ns {0} --grow {0}", many.join(","));
        assert!(told(&many).contains("at most 1000000 combinations"));
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        let times = [0, 999, 50_000, 1_234, 3_200_000, 1_500_000_000].map(time);
        assert_eq!(times, ["0ns", "999ns", "50us", "1.2us", "3.2ms", "1.5s"]);
    }
}
