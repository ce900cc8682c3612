//! From figures to places on a plot: scales, ticks at round numbers, labels that do not overlap.

/// How values are spread over an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Linear,
    /// For values above 0.
    Log,
    /// For shares between 0 and 1, both excluded: ln(q / (1 - q)), which gives both tails room.
    Logit,
}

/// An axis: values from `low` to `high` on pixels from `start` to `end`.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    kind: Kind,
    low: f64,
    high: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// An axis with all of these values on it; without any, from 0 to 1 (or 1 to 10). Values that a
    /// kind of axis cannot have are left out.
    pub fn over(kind: Kind, values: impl IntoIterator<Item = f64>, start: f64, end: f64) -> Scale {
        let fits = |value: &f64| match kind {
            Kind::Linear => value.is_finite() && value.abs() < 1e300,
            Kind::Log => value.is_finite() && *value > 1e-300,
            Kind::Logit => *value > 0.0 && *value < 1.0,
        };
        let (mut low, mut high) = values
            .into_iter()
            .filter(fits)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = if kind == Kind::Linear { (0.0, 1.0) } else { (0.1, 0.9) };
        }
        if low == high {
            (low, high) = match kind {
                Kind::Linear if low == 0.0 => (0.0, 1.0),
                Kind::Linear => (low - low.abs() * 0.1, high + high.abs() * 0.1),
                Kind::Log => (low / 1.5, high * 1.5),
                Kind::Logit => (low / 2.0, 0.5 + high / 2.0),
            };
        }
        Scale { kind, low, high, start, end }
    }

    /// The same with room before and after the outermost values, as a part of the axis.
    pub fn padded(mut self, part: f64) -> Scale {
        let (low, high) = (self.bent(self.low), self.bent(self.high));
        let pad = (high - low) * part;
        let straight = |value: f64| match self.kind {
            Kind::Linear => value,
            Kind::Log => value.exp(),
            Kind::Logit => 1.0 / (1.0 + (-value).exp()),
        };
        // An axis of values above 0 does not go below.
        let floor = if self.kind == Kind::Linear && self.low >= 0.0 { 0.0 } else { f64::MIN };
        (self.low, self.high) = (straight(low - pad).max(floor), straight(high + pad));
        self
    }

    fn bent(&self, value: f64) -> f64 {
        match self.kind {
            Kind::Linear => value,
            Kind::Log => value.ln(),
            Kind::Logit => (value / (1.0 - value)).ln(),
        }
    }

    /// Where a value is; values off the axis are at its ends.
    pub fn at(&self, value: f64) -> f64 {
        let (low, high) = (self.bent(self.low), self.bent(self.high));
        let part = (self.bent(value.clamp(self.low, self.high)) - low) / (high - low);
        let part = if part.is_finite() { part } else { 0.0 };
        self.start + part * (self.end - self.start)
    }

    /// Where the axis ends.
    pub fn end(&self) -> f64 {
        self.end
    }

    /// Round values on this axis, some `wanted` of them, rising.
    pub fn ticks(&self, wanted: usize) -> Vec<f64> {
        match self.kind {
            Kind::Linear => linear_ticks(self.low, self.high, wanted),
            Kind::Log => log_ticks(self.low, self.high, wanted),
            Kind::Logit => [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999]
                .into_iter()
                .filter(|q| (self.low..=self.high).contains(q))
                .collect(),
        }
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64, wanted: usize) -> Vec<f64> {
    let raw = (high - low) / wanted.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let Some(step) = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|s| *s >= raw)
    else {
        return Vec::new();
    };
    let first = (low / step - 1e-9).ceil();
    (0..=2 * wanted)
        .map(|index| (first + index as f64) * step)
        .take_while(|tick| *tick <= high + step * 1e-9)
        .map(|tick| if tick.abs() < step * 1e-9 { 0.0 } else { tick })
        .collect()
}

/// 1, 2 and 5 in each decade, or fewer where there are many decades; between neighbours of one decade
/// as on a linear axis.
fn log_ticks(low: f64, high: f64, wanted: usize) -> Vec<f64> {
    let decades = (high / low).log10();
    if decades < 0.6 {
        return linear_ticks(low, high, wanted).into_iter().filter(|tick| *tick > 0.0).collect();
    }
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let many: &[f64] = if decades * 3.0 <= wanted as f64 + 1.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let stride = (decades / wanted.max(1) as f64).ceil().max(1.0) as usize;
    (first..=last)
        .step_by(stride)
        .flat_map(|power| many.iter().map(move |one| one * 10f64.powi(power)))
        .filter(|tick| *tick >= low * (1.0 - 1e-9) && *tick <= high * (1.0 + 1e-9))
        .collect()
}

/// Moves places on a line apart, so that neighbours are `gap` from each other and all are between `low`
/// and `high` if there is room, as little as that takes. The order stays.
pub fn spread(places: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by(|a, b| places[*a].total_cmp(&places[*b]));
    // Runs of neighbours that touch: the sum of where their members would have the first, how many.
    let mut runs: Vec<(f64, usize)> = Vec::new();
    for index in &order {
        runs.push((places[*index], 1));
        while let [.., (a, m), (b, n)] = runs[..] {
            if b / n as f64 - a / m as f64 >= m as f64 * gap {
                break;
            }
            runs.truncate(runs.len() - 2);
            runs.push((a + b - n as f64 * m as f64 * gap, m + n));
        }
    }
    let mut moved = vec![0.0; places.len()];
    let mut order = order.into_iter();
    let mut least = low;
    for (index, &(sum, count)) in runs.iter().enumerate() {
        let rest: usize = runs[index..].iter().map(|run| run.1).sum();
        let first = (sum / count as f64).min(high - (rest - 1) as f64 * gap).max(least);
        for (step, index) in order.by_ref().take(count).enumerate() {
            moved[index] = first + step as f64 * gap;
        }
        least = first + count as f64 * gap;
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_on_the_axis() {
        let linear = |low, high| Scale::over(Kind::Linear, [low, high], 0.0, 1.0).ticks(5);
        assert_eq!(linear(0.0, 97.0), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(linear(-3.0, 3.0), [-2.0, 0.0, 2.0]);
        assert_eq!(linear(1.01e6, 1.05e6), [1.01e6, 1.02e6, 1.03e6, 1.04e6, 1.05e6]);
        let log = |low, high| Scale::over(Kind::Log, [low, high], 0.0, 1.0).ticks(6);
        assert_eq!(log(8.0, 210.0), [10.0, 20.0, 50.0, 100.0, 200.0]);
        assert_eq!(log(70.0, 95.0), [70.0, 75.0, 80.0, 85.0, 90.0, 95.0]);
        assert_eq!(log(1.0, 1e6).len(), 7);
        assert!(log(1e-299, 1e299).len() < 20);
    }

    #[test]
    fn any_values_give_an_axis() {
        let hostile = [f64::NAN, f64::INFINITY, -1.0, 0.0, f64::MAX, f64::MIN_POSITIVE, 3.0];
        for kind in [Kind::Linear, Kind::Log, Kind::Logit] {
            for count in 0..=hostile.len() {
                let scale = Scale::over(kind, hostile[..count].to_vec(), 10.0, 90.0).padded(0.05);
                assert!(scale.ticks(5).len() < 20);
                for value in hostile.into_iter().chain([0.5]) {
                    let at = scale.at(value);
                    assert!((10.0..=90.0).contains(&at), "{kind:?} {count} {value}: {at}");
                }
            }
        }
    }

    #[test]
    fn labels_are_moved_apart_and_stay_between_the_ends() {
        assert_eq!(spread(&[], 10.0, 0.0, 100.0), [0.0; 0]);
        assert_eq!(spread(&[50.0, 20.0], 10.0, 0.0, 100.0), [50.0, 20.0]);
        assert_eq!(spread(&[50.0, 50.0], 10.0, 0.0, 100.0), [45.0, 55.0]);
        assert_eq!(spread(&[99.0, 98.0, 0.0], 10.0, 0.0, 100.0), [100.0, 90.0, 0.0]);
        assert_eq!(spread(&[1.0, 2.0], 10.0, 0.0, 100.0), [0.0, 10.0]);
    }
}
