//! `report.html`: one file that needs nothing else. It is complete without JavaScript; the script adds
//! copy buttons and switches for single settings.
//!
//! All text from the document goes through maud, which escapes it; colours and numbers are named by
//! classes and attributes that hold figures of our own only.

use std::collections::BTreeSet;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value as Json;

use super::{POLLUX, axis_title, causes, figure, groups, noise_in_words, percent, shell};
use crate::results::{Advice, FIGURES, Interval, Results};
use view::{Colours, Gain, Series, View};

mod plots;
mod scale;
mod table;
mod view;

/// What the page may load: nothing but what is in it.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      img-src data:; base-uri 'none'; form-action 'none'";

/// Writes the document as a page for people.
pub fn render(results: &Results) -> String {
    let groups = groups(results);
    let mut colours = Colours::default();
    let views: Vec<View> = groups.iter().map(|group| View::new(group, &mut colours)).collect();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                link rel="icon" href="data:,";
                title { "pollux bench: " (results.name) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                header {
                    p.kicker { "pollux bench · " (results.name) }
                    h1 { @if results.question.is_empty() { (results.name) } @else { (results.question) } }
                    (facts(results))
                }
                main {
                    (found(results, &views))
                    @for (index, view) in views.iter().enumerate() { (workload(index, view)) }
                    @if views.is_empty() { section.card { p.empty { "Nothing was measured." } } }
                    (how(results))
                }
                footer {
                    "Made by Pollux " (results.version) " from results.json alone. Medians of runs, with 95 % "
                    "confidence intervals from the bootstrap."
                }
                script { (PreEscaped(include_str!("script.js"))) }
            }
        }
    }
    .into_string()
}

/// A text in the host's or guest's facts, if it is there.
fn text(facts: &Json, name: &str) -> Option<String> {
    match facts.get(name)? {
        Json::String(text) if !text.is_empty() => Some(text.clone()),
        Json::Number(number) => Some(number.to_string()),
        Json::Array(items) if !items.is_empty() => {
            Some(items.iter().filter_map(Json::as_str).collect::<Vec<_>>().join(", "))
        }
        _ => None,
    }
}

/// Where and when.
fn facts(results: &Results) -> Markup {
    let (host, guest) = (&results.host, &results.guest);
    let cpus = |facts: &Json| {
        text(facts, "cpus").map(|cpus| format!("{cpus} CPU{}", if cpus == "1" { "" } else { "s" }))
    };
    let joined =
        |parts: [Option<String>; 3]| parts.into_iter().flatten().collect::<Vec<_>>().join(" · ");
    let nested = host.get("is_guest") == Some(&Json::Bool(true));
    let machine = joined([text(host, "cpu"), cpus(host), nested.then(|| "itself a guest".into())]);
    let kernel = joined([text(host, "kernel"), text(host, "kvm_modules"), None]);
    let named = |what: &str, name: &str| Some(format!("{what} {}", text(guest, name)?));
    let idle =
        joined([named("driver", "cpuidle_driver"), named("governor", "cpuidle_governor"), None]);
    let inside = joined([text(guest, "kernel"), cpus(guest), None]);
    let (runs, failed) = view::runs(results);
    let when = match &results.ended {
        Some(ended) => {
            let (started, ended) = (moment(&results.started), moment(ended));
            let same_day = started.get(..11).filter(|day| ended.starts_with(day));
            let ended = same_day.map_or(ended.as_str(), |day| &ended[day.len()..]);
            format!("{started} to {ended}")
        }
        None => format!("{}, not finished", moment(&results.started)),
    };
    let mut measured = format!("{} settings, {runs} runs", results.rows.len());
    if failed > 0 {
        measured.push_str(&format!(", {failed} failed"));
    }
    let facts = [
        ("host", machine),
        ("host kernel", kernel),
        ("guest", inside),
        ("guest idle", idle),
        ("measured", measured),
        ("when (UTC)", when),
    ];
    html! {
        dl.facts {
            @for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
                div { dt { (name) } dd { (value) } }
            }
        }
    }
}

/// `2026-11-30T09:14:02Z` for people.
fn moment(rfc3339: &str) -> String {
    match rfc3339.get(..16) {
        Some(minutes) if rfc3339.is_ascii() => minutes.replace('T', " "),
        _ => rfc3339.into(),
    }
}

/// What was found out: advice, surprises, noise.
fn found(results: &Results, views: &[View]) -> Markup {
    html! {
        @if !results.advice.is_empty() {
            section {
                h2 { "What to set" }
                div.pair {
                    @for advice in &results.advice { (advised(advice, views)) }
                }
            }
        }
        div.pair {
            @if !results.notes.is_empty() {
                section.card.notes {
                    h2 { "Surprises" }
                    ul { @for note in &results.notes { li { (note) } } }
                }
            }
            section.card {
                h2 { "How noisy the machine was" }
                @if results.noise.is_empty() {
                    p { "Not known: no setting was measured twice. Take small differences for nothing." }
                }
                dl.noise {
                    @for noise in &results.noise {
                        dt { (noise.workload) }
                        dd { (noise_in_words(noise).replace(" %", "\u{a0}%")) }
                    }
                }
            }
        }
    }
}

fn advised(advice: &Advice, views: &[View]) -> Markup {
    let series = advice.row.as_ref().and_then(|id| {
        views.iter().filter(|view| view.group.workload == advice.workload).find_map(|v| v.by_id(id))
    });
    let lines = [
        ("pollux run", shell(&advice.pollux)),
        ("kvm module", advice.kvm_module.join(" ")),
        ("guest kernel", advice.guest_cmdline.join(" ")),
    ];
    html! {
        article.card.advice.none[advice.row.is_none()] {
            p.kicker { (advice.workload) " · " (advice.goal) }
            @match (series, &advice.row) {
                (Some(series), _) => h3 { (disc(series)) (series.label) },
                (None, Some(row)) => h3 { (row) },
                (None, None) => h3 { "No setting reaches this goal" },
            }
            p { (advice.why) }
            @for (name, line) in lines.iter().filter(|(_, line)| !line.is_empty()) {
                (code(name, line))
            }
        }
    }
}

/// A line to copy, with what it is.
fn code(name: &str, line: &str) -> Markup {
    html! {
        div.code {
            span.what { (name) }
            button.copy type="button" hidden { "copy" }
            pre tabindex="0" { code { (line) } }
        }
    }
}

/// A row's number on a disc of its colour.
fn disc(series: &Series) -> Markup {
    html! {
        span class={ "disc " (series.class) @if series.peer { " peer" } } { (series.number) }
    }
}

/// Everything about one workload.
fn workload(index: usize, view: &View) -> Markup {
    let group = view.group;
    let all_failed = group.rows.iter().all(|row| row.summary.is_empty());
    html! {
        section.workload id={ "w" (index + 1) } {
            h2 { (group.workload) }
            @if all_failed {
                p.empty { "No run of this workload succeeded; what they said is below." }
            } @else {
                (best(view))
                (legend(view))
                div.plots {
                    (plot("Latency", html! {
                        "Further left is faster. The scale of shares gives both ends room: the top is the tail, up to p99.9."
                    }, plots::latency(view), "No run recorded how its latencies are spread."))
                    (plot("What low latency costs", html! {
                        "Down and left is better. The line joins what no setting beats; hollow marks are dominated: another "
                        "setting is nowhere worse and somewhere better. Bars: confidence."
                        @if group.rows.iter().any(|row| row.monitor != POLLUX) { " Diamonds: other monitors." }
                    }, plots::frontier(view, Gain::Latency), "No row has both latency and CPU time."))
                    (plot("What speed costs", html! {
                        "Up and left is better."
                    }, plots::frontier(view, Gain::Iops), "No row has both requests a second and CPU time."))
                    (plot("What a request causes", html! {
                        "Exits of the vCPU by kind, and the signals between driver and device."
                    }, plots::exits(view), "No row counted exits, interrupts or kicks."))
                    @if let Some(windows) = plots::windows(view) {
                        (plot("The host's poll window", html! {
                            "How long a halt would poll before it sleeps, as KVM's policy or Pollux's grew and shrank it."
                        }, Some(windows), ""))
                    }
                }
            }
            (table::settings(view))
            (failed(view))
            (commands(view))
        }
    }
}

fn plot(title: &str, help: Markup, plot: Option<Markup>, absent: &str) -> Markup {
    html! {
        figure.card.plot {
            figcaption { h3 { (title) } p { (help) } }
            @match plot {
                Some(plot) => (plot),
                None => p.empty { (absent) },
            }
        }
    }
}

/// The winners: one tile each.
fn best(view: &View) -> Markup {
    let tiles = [
        ("most requests a second", "iops", ""),
        ("lowest p99", "lat_p99_us", " us"),
        ("least CPU time a request", view.cost, " us"),
    ];
    html! {
        div.tiles {
            @for (title, name, unit) in tiles {
                @if let Some((series, interval)) = winner(view, name) {
                    div.tile {
                        p.kicker { (title) }
                        p.value { (table::grouped(interval.median)) (unit) }
                        p { (disc(series)) (series.label) " " (table::difference(series.row, name)) }
                        @if let Some(equal) = equal(view, series, name, interval.median) { p.hint { (equal) } }
                    }
                }
            }
        }
    }
}

/// The row with the best median.
fn winner<'v, 'a>(view: &'v View<'a>, name: &str) -> Option<(&'v Series<'a>, Interval)> {
    let more = FIGURES.iter().find(|figure| figure.name == name)?.more_is_better?;
    view.series.iter().filter_map(|series| Some((series, figure(series.row, name)?))).min_by(
        |a, b| {
            let order = a.1.median.total_cmp(&b.1.median);
            if more { order.reverse() } else { order }
        },
    )
}

/// In words: which others are as good as the winner, as far as the noise lets us know.
fn equal(view: &View, winner: &Series, name: &str, best: f64) -> Option<String> {
    let noise = view.group.noise?.relative.get(name)?.abs();
    let numbers: Vec<String> = view
        .series
        .iter()
        .filter(|series| series.number != winner.number)
        .filter(|series| {
            figure(series.row, name).is_some_and(|f| (f.median - best).abs() <= noise * best.abs())
        })
        .map(|series| series.number.to_string())
        .collect();
    match &numbers[..] {
        [] => None,
        [only] => Some(format!("{only} is as good, inside the noise")),
        many if many.len() <= 6 => {
            Some(format!("{} are as good, inside the noise", many.join(", ")))
        }
        many => Some(format!("{} others are as good, inside the noise", many.len())),
    }
}

/// Which number and colour is which setting; a switch each, where there is a script.
fn legend(view: &View) -> Markup {
    let faint = view.series.iter().filter(|series| !series.strong).count();
    html! {
        @if view.group.axes.len() > 1 {
            p.hint {
                "Settings are named by "
                (view.group.axes.iter().map(|axis| axis_title(axis)).collect::<Vec<_>>().join(" · "))
            }
        }
        ul.legend {
            @for series in &view.series {
                li class=[(!series.strong).then_some("weak")] data-chip=(series.number) {
                    (disc(series)) (series.label)
                    @if series.number == 1 { span.base { "base" } }
                }
            }
        }
        @if faint > 0 {
            p.hint {
                "In colour: the base, what is advised, and what nothing of the same monitor beats. Grey: the other "
                (faint) "."
            }
        }
    }
}

/// The runs that failed, with why.
fn failed(view: &View) -> Markup {
    let causes = || {
        view.series
            .iter()
            .flat_map(|series| causes(series.row).into_iter().map(move |c| (series, c)))
    };
    html! {
        @if causes().next().is_some() {
            div.card.failed {
                h3 { "Runs that failed" }
                ul {
                    @for (series, (repeats, why)) in causes() {
                        li { (disc(series)) (series.label) ", " (repeats) ": " span.why { (why) } }
                    }
                }
            }
        }
    }
}

/// How to repeat each row.
fn commands(view: &View) -> Markup {
    html! {
        details.card.commands {
            summary { "Commands that repeat each setting" }
            @for series in &view.series {
                div.command {
                    h4 { (disc(series)) (series.label) }
                    (code("on the host", &shell(&series.row.command)))
                    @if !series.row.guest_command.is_empty() {
                        (code("in the guest", &series.row.guest_command))
                    }
                    @for note in series.row.runs.iter().flat_map(|run| &run.notes).collect::<BTreeSet<_>>() {
                        p.hint { (note) }
                    }
                }
            }
        }
    }
}

/// How to repeat all of it.
fn how(results: &Results) -> Markup {
    html! {
        details.card.commands {
            summary { "Repeat all of it" }
            (code("command", &shell(&results.command)))
            @if !results.plan.is_empty() { (code("plan (TOML)", results.plan.trim_end())) }
            @for (name, facts) in [("host", &results.host), ("guest", &results.guest)] {
                @if facts.is_object() {
                    (code(name, &serde_json::to_string_pretty(facts).unwrap_or_default()))
                }
            }
        }
    }
}

/// A difference as a word with a sign, for tiles and tables.
fn signed(relative: f64) -> String {
    // A real minus sign is as wide as a plus.
    percent(relative).replace('-', "−").replace(' ', "\u{a0}")
}
