//! The plots: SVG, without a script. Colours and line widths are classes of style.css; a row's number
//! names it in every plot.

use maud::{Markup, html};

use super::super::{figure, number};
use super::scale::{Kind, Scale, spread};
use super::view::{self, Gain, Series, View};

/// All plots are so wide, in units of SVG; the page scales them.
const WIDTH: f64 = 460.0;

/// One decimal of a unit is enough.
fn px(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map(String::from).unwrap_or(text)
}

fn path(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut path = String::new();
    for (x, y) in points {
        path.push(if path.is_empty() { 'M' } else { 'L' });
        path.push_str(&format!("{} {}", px(x), px(y)));
    }
    path
}

/// An `svg` of a height, named for those who do not see it.
fn svg(height: f64, name: &str, inner: &Markup) -> Markup {
    html! {
        svg viewBox={ "0 0 " (px(WIDTH)) " " (px(height)) } role="img" aria-label=(name) {
            title { (name) }
            (inner)
        }
    }
}

/// A tick's label: as short as can be told from its neighbours.
fn tick_text(tick: f64) -> String {
    match tick.abs() {
        size if size >= 1e9 => format!("{tick:.0e}"),
        size if size >= 1e6 => format!("{} M", (tick / 1e5).round() / 10.0),
        size if size >= 1e4 => format!("{} k", (tick / 1e2).round() / 10.0),
        size if size < 1e-3 && size > 0.0 => format!("{tick:.0e}"),
        _ => ((tick * 1e4).round() / 1e4).to_string(),
    }
}

/// Lines and labels at an x axis's ticks, and its title below.
fn x_axis(scale: &Scale, wanted: usize, top: f64, bottom: f64, title: &str) -> Markup {
    html! {
        @for tick in scale.ticks(wanted) {
            @let x = px(scale.at(tick));
            line.grid x1=(x) x2=(x) y1=(px(top)) y2=(px(bottom)) {}
            text.tick x=(x) y=(px(bottom + 16.0)) text-anchor="middle" { (tick_text(tick)) }
        }
        text.axis x=(px(scale.end())) y=(px(bottom + 34.0)) text-anchor="end" { (title) }
    }
}

/// The same for a y axis, its title above.
fn y_axis(
    scale: &Scale,
    ticks: impl IntoIterator<Item = (f64, String)>,
    (left, right): (f64, f64),
    title: &str,
) -> Markup {
    html! {
        @for (tick, text) in ticks {
            @let y = scale.at(tick);
            line.grid x1=(px(left)) x2=(px(right)) y1=(px(y)) y2=(px(y)) {}
            text.tick x=(px(left - 7.0)) y=(px(y + 4.0)) text-anchor="end" { (text) }
        }
        text.axis x="2" y="12" { (title) }
    }
}

/// A row's number on a disc of its colour; on a square, if it is of another monitor.
fn tag(series: &Series, x: f64, y: f64) -> Markup {
    let wide = 9.0 + 6.0 * series.number.to_string().len() as f64;
    html! {
        g class={ "tag " (series.class) } data-k=(series.number) {
            rect x=(px(x - wide / 2.0)) y=(px(y - 7.5)) width=(px(wide)) height="15"
                rx=(if series.peer { "3" } else { "7.5" }) {}
            text x=(px(x)) y=(px(y + 3.4)) text-anchor="middle" { (series.number) }
        }
    }
}

/// The faint ones first, so that the strong ones lie above them; the base last.
fn by_strength<'a, 'v>(view: &'v View<'a>) -> Vec<&'v Series<'a>> {
    let mut series: Vec<_> = view.series.iter().collect();
    series.sort_by_key(|series| (series.strong, series.number == 1));
    series
}

/// A latency's distribution over a row's runs: by quantile the median of the runs, in microseconds.
fn distribution(series: &Series) -> Vec<(f64, f64)> {
    let runs: Vec<Vec<(f64, f64)>> = series
        .row
        .runs
        .iter()
        .filter(|run| run.error.is_none())
        .map(|run| {
            let mut points: Vec<(f64, f64)> = run
                .latency_us
                .iter()
                .map(|[q, us]| (*q, *us))
                .filter(|(q, us)| (0.0..=1.0).contains(q) && us.is_finite() && *us > 0.0)
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
            points
        })
        .filter(|points| points.len() > 1)
        .collect();
    let from = runs.iter().map(|points| points[0].0).fold(0.01, f64::max);
    let to = runs.iter().map(|points| points[points.len() - 1].0).fold(0.999, f64::min);
    let mut grid: Vec<f64> = runs
        .iter()
        .flatten()
        .map(|point| point.0)
        .chain([from, to])
        .filter(|q| (from..=to).contains(q))
        .collect();
    grid.sort_by(f64::total_cmp);
    grid.dedup();
    let stride = grid.len().div_ceil(160).max(1);
    let last = grid.len().saturating_sub(1);
    let mut worst = 0.0f64;
    grid.into_iter()
        .enumerate()
        .filter(|(index, _)| index % stride == 0 || *index == last)
        .filter_map(|(_, q)| {
            let mut found: Vec<f64> = runs.iter().filter_map(|run| interpolate(run, q)).collect();
            found.sort_by(f64::total_cmp);
            worst = worst.max(*found.get(found.len() / 2)?);
            Some((q, worst))
        })
        .collect()
}

/// The latency at a quantile between two that are known.
fn interpolate(points: &[(f64, f64)], q: f64) -> Option<f64> {
    let after = points.iter().position(|point| point.0 >= q)?;
    let (b, before) = (points[after], points[after.saturating_sub(1)]);
    let part = if b.0 > before.0 { (q - before.0) / (b.0 - before.0) } else { 1.0 };
    Some(before.1 + (b.1 - before.1) * part)
}

/// How long requests take: a line a setting. None if no run has a distribution.
pub fn latency(view: &View) -> Option<Markup> {
    let (left, right, top, bottom) = (52.0, 448.0, 52.0, 322.0);
    let lines: Vec<(&Series, Vec<(f64, f64)>)> = by_strength(view)
        .into_iter()
        .map(|series| (series, distribution(series)))
        .filter(|(_, line)| line.len() > 1)
        .collect();
    let points = || lines.iter().flat_map(|(_, line)| line);
    points().next()?;
    let x = Scale::over(Kind::Log, points().map(|point| point.1), left, right).padded(0.02);
    let y = Scale::over(Kind::Logit, points().map(|point| point.0), bottom, top);
    let shares = y.ticks(8).into_iter().map(|q| (q, format!("{} %", (q * 1e4).round() / 1e2)));
    let tagged: Vec<(&Series, (f64, f64))> = lines
        .iter()
        .filter(|(series, _)| series.strong)
        .filter_map(|(series, line)| line.last().map(|(q, us)| (*series, (x.at(*us), y.at(*q)))))
        .collect();
    let ends: Vec<f64> = tagged.iter().map(|(_, end)| end.0).collect();
    let tags =
        spread(&ends, if view.series.len() > 9 { 22.0 } else { 17.0 }, left + 8.0, right - 8.0);
    Some(svg(
        372.0,
        &format!("Latency of {}: share of requests done within a time", view.group.workload),
        &html! {
            (x_axis(&x, 6, top, bottom, "latency, us (logarithmic)"))
            (y_axis(&y, shares, (left, right), "done within that time"))
            @for (series, line) in &lines {
                path class={ "line " (series.class) } data-k=(series.number)
                    d=(path(line.iter().map(|(q, us)| (x.at(*us), y.at(*q))))) {
                    title { (series.number) ": " (series.label) }
                }
                @if series.strong {
                    @for quantile in [0.5, 0.9, 0.99] {
                        @if let Some(us) = interpolate(line, quantile) {
                            circle class={ "dot " (series.class) } data-k=(series.number) r="3.2"
                                cx=(px(x.at(us))) cy=(px(y.at(quantile))) {
                                title {
                                    (series.number) ": " (series.label) ", "
                                    (quantile * 100.0) " % within " (number(us)) " us"
                                }
                            }
                        }
                    }
                }
            }
            @for ((series, end), tag_x) in tagged.iter().zip(&tags) {
                path class={ "leader " (series.class) } data-k=(series.number)
                    d=(path([(end.0, end.1 - 2.0), (*tag_x, top - 14.0)])) {}
                (tag(series, *tag_x, top - 20.0))
            }
        },
    ))
}

/// Latency or requests a second against what a request costs the host. None if no row has both.
pub fn frontier(view: &View, gain: Gain) -> Option<Markup> {
    let (left, right, top, bottom) = (52.0, 448.0, 26.0, 322.0);
    let points: Vec<_> = by_strength(view)
        .into_iter()
        .filter_map(|series| {
            Some((series, figure(series.row, view.cost)?, figure(series.row, gain.figure())?))
        })
        .collect();
    if points.is_empty() {
        return None;
    }
    let costs = || points.iter().flat_map(|(_, cost, _)| [cost.low, cost.high]);
    let gains = || points.iter().flat_map(|(_, _, gain)| [gain.low, gain.high]);
    // Costs that are many times each other are seen on a logarithmic axis only.
    let (least, most) = costs().fold((f64::MAX, 0.0f64), |(a, b), v| (a.min(v), b.max(v)));
    let kind = if least > 0.0 && most / least > 12.0 { Kind::Log } else { Kind::Linear };
    let x = Scale::over(kind, costs(), left, right).padded(0.07);
    let y = Scale::over(Kind::Linear, gains(), bottom, top).padded(0.08);
    let at = |index: &usize| {
        let row = view.series[*index].row;
        Some((x.at(figure(row, view.cost)?.median), y.at(figure(row, gain.figure())?.median)))
    };
    let frontier = view::frontier(view.group, view.cost, gain);
    let frontier: Vec<(f64, f64)> = frontier.iter().filter_map(at).collect();
    let centres: Vec<(usize, f64, f64)> = points
        .iter()
        .map(|(series, cost, gained)| (series.number, x.at(cost.median), y.at(gained.median)))
        .collect();
    let places = label_places(&centres, (left, right, top, bottom));
    let ticks = y.ticks(6).into_iter().map(|tick| (tick, tick_text(tick)));
    let whose = if view.cost.starts_with("host") { "host CPU" } else { "vCPU threads' CPU" };
    Some(svg(
        372.0,
        &format!("{}: {} against {whose} time a request", view.group.workload, gain.title()),
        &html! {
            (x_axis(&x, 6, top, bottom, &format!("{whose} time a request, us")))
            (y_axis(&y, ticks, (left, right), gain.title()))
            path.frontier d=(path(frontier)) {}
            @for (((series, cost, gained), (_, cx, cy)), place) in points.iter().zip(&centres).zip(&places) {
                @let hollow = if series.row.dominated_by.is_some() { " hollow" } else { "" };
                g class={ "point " (series.class) (hollow) } data-k=(series.number) {
                    title {
                        (series.number) ": " (series.label) ", " (gain.title()) " " (number(gained.median)) " ("
                        (number(gained.low)) " to " (number(gained.high)) "), CPU time " (number(cost.median)) " us ("
                        (number(cost.low)) " to " (number(cost.high)) ")"
                        @if series.row.dominated_by.is_some() { ", dominated" }
                    }
                    path.whisker d={
                        (path([(x.at(cost.low), *cy), (x.at(cost.high), *cy)]))
                        (path([(*cx, y.at(gained.low)), (*cx, y.at(gained.high))]))
                    } {}
                    @if series.peer {
                        path.mark d={ (path([(*cx - 6.5, *cy), (*cx, *cy - 6.5), (*cx + 6.5, *cy), (*cx, *cy + 6.5)])) "Z" } {}
                    } @else {
                        circle.mark cx=(px(*cx)) cy=(px(*cy)) r="5" {}
                    }
                    @if let Some((text_x, text_y)) = place {
                        text.key x=(px(*text_x)) y=(px(*text_y)) text-anchor="middle" { (series.number) }
                    }
                }
            }
        },
    ))
}

/// Where the numbers of points (number, x, y) stand: beside each, where no point and no other number is. A point in
/// a crowd has none. Later points choose first.
fn label_places(
    points: &[(usize, f64, f64)],
    (left, right, top, bottom): (f64, f64, f64, f64),
) -> Vec<Option<(f64, f64)>> {
    // Corners first: whiskers are above, below and beside.
    let around = [
        (0.6, -7.0),
        (-0.6, -7.0),
        (0.6, 15.0),
        (-0.6, 15.0),
        (0.0, -9.0),
        (0.0, 17.0),
        (1.1, 4.0),
        (-1.1, 4.0),
    ];
    let mut taken: Vec<(f64, f64, f64)> = Vec::new();
    let mut places: Vec<Option<(f64, f64)>> = points
        .iter()
        .rev()
        .map(|(number, cx, cy)| {
            // Half of the text's width; its middle is 4 above its foot.
            let half = number.to_string().len() as f64 * 3.6;
            let free = |(x, y): (f64, f64), (px, py, width): (f64, f64, f64)| {
                (px - x).abs() > half + width || (py - (y - 4.0)).abs() > 9.0
            };
            let place = around
                .iter()
                .map(|(side, dy)| (cx + side * (8.0 + half), cy + dy))
                .filter(|(x, y)| (left + 6.0..right).contains(x) && (top..bottom).contains(y))
                .find(|place| {
                    points.iter().all(|(_, x, y)| free(*place, (*x, *y, 5.0)))
                        && taken.iter().all(|(x, y, width)| free(*place, (*x, *y - 4.0, *width)))
                });
            taken.extend(place.map(|(x, y)| (x, y, half + 1.0)));
            place
        })
        .collect();
    places.reverse();
    places
}

/// How many strips of windows are drawn.
const STRIPS: usize = 12;

/// The host's poll window over time, a strip a setting. None if none was recorded.
pub fn windows(view: &View) -> Option<Markup> {
    let (left, right) = (34.0, 418.0);
    let recorded: Vec<(&Series, Vec<(f64, f64)>)> = view
        .series
        .iter()
        .map(|series| {
            let points = series.row.window_us.iter().map(|[s, us]| (*s, *us));
            let sound = points.filter(|(s, us)| s.is_finite() && us.is_finite() && *us >= 0.0);
            (series, sound.collect::<Vec<_>>())
        })
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let mut strips = recorded.clone();
    if strips.len() > STRIPS {
        strips.retain(|(series, _)| series.strong);
        strips.truncate(STRIPS);
    }
    if strips.is_empty() {
        strips = recorded.clone();
        strips.truncate(STRIPS);
    }
    let points = || strips.iter().flat_map(|(_, points)| points);
    points().next()?;
    let (height, top) = ((250.0 / strips.len() as f64 - 9.0).clamp(26.0, 60.0), 26.0);
    let bottom = top + strips.len() as f64 * (height + 9.0);
    let x = Scale::over(Kind::Linear, points().map(|point| point.0), left, right);
    let most = points().map(|point| point.1).fold(0.0, f64::max);
    Some(svg(
        bottom + 46.0,
        &format!("{}: the host's poll window over time", view.group.workload),
        &html! {
            (x_axis(&x, 6, top, bottom, "seconds since the start"))
            text.axis x="2" y="12" { "window, us; each strip reaches up to " (number(most)) " us" }
            @for (index, (series, points)) in strips.iter().enumerate() {
                @let foot = top + index as f64 * (height + 9.0) + height;
                @let y = Scale::over(Kind::Linear, [0.0, most], foot, foot - height);
                @let steps = steps(points, &x, &y);
                @let own = points.iter().map(|point| point.1).fold(0.0, f64::max);
                g class=(series.class) data-k=(series.number) {
                    title { (series.number) ": " (series.label) ", up to " (number(own)) " us" }
                    line.foot x1=(px(left)) x2=(px(right)) y1=(px(foot)) y2=(px(foot)) {}
                    path.area d={
                        (path(steps.iter().copied()
                            .chain(steps.last().map(|last| (last.0, foot)))
                            .chain(steps.first().map(|first| (first.0, foot)))))
                        "Z"
                    } {}
                    path.line.thin d=(path(steps.iter().copied())) {}
                    text.tick x=(px(right + 6.0)) y=(px(y.at(own) + 4.0)) { (tick_text(own)) }
                }
                (tag(series, 12.0, foot - height / 2.0))
            }
            @if recorded.len() > strips.len() {
                text.axis x="2" y=(px(bottom + 34.0)) {
                    (recorded.len() - strips.len()) " more in results.json"
                }
            }
        },
    ))
}

/// A line of steps through points; where many share a pixel, their least and greatest.
fn steps(points: &[(f64, f64)], x: &Scale, y: &Scale) -> Vec<(f64, f64)> {
    let mut sorted = points.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut line: Vec<(f64, f64)> = Vec::new();
    let mut index = 0;
    while index < sorted.len() {
        let column = x.at(sorted[index].0).round();
        let mut end = index + 1;
        while end < sorted.len() && x.at(sorted[end].0).round() == column {
            end += 1;
        }
        let values = || sorted[index..end].iter().map(|point| point.1);
        if let Some(last) = line.last() {
            line.push((column, last.1));
        }
        if end - index > 2 {
            line.push((column, y.at(values().fold(f64::MAX, f64::min))));
            line.push((column, y.at(values().fold(0.0, f64::max))));
        }
        line.push((column, y.at(sorted[end - 1].1)));
        index = end;
    }
    if let [only] = line[..] {
        line.push((x.end(), only.1));
    }
    line
}

/// Kinds of exits, from the figure's name to the word in the legend; `e1` and up are their classes.
const EXITS: [(&str, &str); 4] = [
    ("exits_halt_per_request", "HLT"),
    ("exits_io_per_request", "ports and memory"),
    ("exits_interrupt_per_request", "interrupts"),
    ("exits_other_per_request", "others"),
];

/// The other side's signals.
const SIGNALS: [(&str, &str); 2] =
    [("interrupts_per_request", "interrupts"), ("kicks_per_request", "kicks")];

/// Exits, interrupts and kicks a request: stacked bars. None if no row has any.
pub fn exits(view: &View) -> Option<Markup> {
    let value =
        |series: &Series, name: &str| figure(series.row, name).map_or(0.0, |f| f.median.max(0.0));
    let parts = |series: &Series| {
        let mut parts: Vec<(String, f64)> =
            EXITS.iter().map(|(name, word)| (word.to_string(), value(series, name))).collect();
        // A monitor that does not tell kinds apart has the sum only.
        let rest =
            value(series, "exits_per_request") - parts.iter().map(|part| part.1).sum::<f64>();
        if rest > 0.005 {
            parts.push(("of unknown kind".into(), rest));
        }
        parts
    };
    let signals = |series: &Series| -> Vec<(String, f64)> {
        SIGNALS.iter().map(|(name, word)| (word.to_string(), value(series, name))).collect()
    };
    let sum = |parts: &[(String, f64)]| parts.iter().map(|part| part.1).sum::<f64>();
    let most = |sums: &mut dyn Iterator<Item = f64>| sums.fold(0.0, f64::max);
    let most_exits = most(&mut view.series.iter().map(|series| sum(&parts(series))));
    let most_signals = most(&mut view.series.iter().map(|series| sum(&signals(series))));
    if most_exits + most_signals <= 0.0 {
        return None;
    }
    let (top, height, pitch) = (62.0, 14.0, 22.0);
    let bottom = top + view.series.len() as f64 * pitch;
    let x = Scale::over(Kind::Linear, [0.0, most_exits], 30.0, 288.0);
    let x2 = Scale::over(Kind::Linear, [0.0, most_signals], 330.0, 432.0);
    Some(svg(
        bottom + 46.0,
        &format!("{}: exits, interrupts and kicks a request", view.group.workload),
        &html! {
            text.axis x="2" y="12" { "exits, by kind" }
            text.axis x="330" y="12" { "signals" }
            (keys(view, 30.0, 'e', &EXITS, 2))
            (keys(view, 330.0, 'g', &SIGNALS, 1))
            (x_axis(&x, 5, top, bottom, "a request"))
            (x_axis(&x2, 3, top, bottom, "a request"))
            @for (index, series) in view.series.iter().enumerate() {
                @let y = top + index as f64 * pitch + (pitch - height) / 2.0;
                g data-k=(series.number) {
                    (stack(series, 'e', &parts(series), &x, y, height))
                    (stack(series, 'g', &signals(series), &x2, y, height))
                    @if sum(&parts(series)) + sum(&signals(series)) <= 0.0 {
                        text.tick x="34" y=(px(y + 11.0)) { "no figures" }
                    }
                }
                (tag(series, 12.0, y + height / 2.0))
            }
        },
    ))
}

/// The legend of a stack, `across` names a line: what any row has.
fn keys(view: &View, left: f64, class: char, names: &[(&str, &str)], across: usize) -> Markup {
    let drawn = |name: &str| {
        view.series.iter().any(|series| figure(series.row, name).is_some_and(|f| f.median > 0.0))
    };
    let shown = names.iter().enumerate().filter(|(_, (name, _))| drawn(name));
    html! {
        @for (place, (index, (_, word))) in shown.enumerate() {
            @let x = left + (place % across) as f64 * 92.0;
            @let y = 34.0 + (place / across) as f64 * 16.0;
            rect class={ (class) (index + 1) } x=(px(x)) y=(px(y - 9.0)) width="10" height="10" rx="2" {}
            text.tick x=(px(x + 15.0)) y=(px(y)) { (word) }
        }
    }
}

/// One bar.
fn stack(
    series: &Series,
    class: char,
    parts: &[(String, f64)],
    x: &Scale,
    y: f64,
    height: f64,
) -> Markup {
    // Where each part starts: the sum of those before it.
    let starts = parts.iter().scan(0.0, |sum, (_, value)| {
        let start = *sum;
        *sum += value;
        Some(start)
    });
    html! {
        @for ((index, (word, value)), from) in parts.iter().enumerate().zip(starts) {
            @let (start, end) = (x.at(from), x.at(from + value));
            @if end - start > 0.05 {
                rect class={ (class) (index + 1) } x=(px(start)) y=(px(y)) height=(px(height))
                    width=(px((end - start - 1.0).max(0.5))) {
                    title { (series.number) ": " (series.label) ", " (word) " " (number(*value)) }
                }
            }
        }
    }
}
