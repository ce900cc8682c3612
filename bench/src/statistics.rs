//! Medians, how sure one is of them, and whether two differ.

use crate::results::Interval;

/// Resamples of a bootstrap.
const RESAMPLES: usize = 2000;
/// The part of resamples beyond each end of an interval: 95 % lie in it.
const TAIL: f64 = 0.025;

/// The median; 0 of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), sorted.len() % 2) {
        (None, _) => 0.0,
        (Some(upper), 1) => *upper,
        (Some(upper), _) => (sorted.get(middle.wrapping_sub(1)).unwrap_or(upper) + upper) / 2.0,
    }
}

/// The median with a confidence interval by the percentile bootstrap: how far the medians of samples
/// drawn from the values themselves, with repetition, are apart. With few values it is too narrow:
/// it never reaches beyond the least and the greatest of them.
pub fn interval(values: &[f64]) -> Interval {
    let mut draw = Draw::new();
    let [low, high] = ends((0..RESAMPLES).map(|_| draw.median(values)).collect());
    Interval { median: median(values), low, high }
}

/// The median of `values` over that of `base`, less 1, with its confidence interval: 0.1 is 10 % more.
/// None if the base's median is 0.
pub fn relative(values: &[f64], base: &[f64]) -> Option<Interval> {
    let ratio = |value: f64, base: f64| (base != 0.0).then(|| value / base - 1.0);
    let median = ratio(median(values), median(base))?;
    let mut draw = Draw::new();
    let resampled = (0..RESAMPLES).filter_map(|_| ratio(draw.median(values), draw.median(base)));
    let [low, high] = ends(resampled.collect());
    Some(Interval { median, low, high })
}

/// The ends of what is left without the tails.
fn ends(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    [TAIL, 1.0 - TAIL]
        .map(|part| values.get((last * part).round() as usize).copied().unwrap_or(0.0))
}

/// Draws with repetition. Always the same draws, so that the same measurements give the same report.
struct Draw(u64);

impl Draw {
    fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// xorshift64*.
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn median(&mut self, values: &[f64]) -> f64 {
        let count = values.len() as u64;
        let mut one = |_| {
            // The high bits are the better ones.
            let index = (u128::from(self.next()) * u128::from(count)) >> 64;
            values.get(index as usize).copied().unwrap_or(0.0)
        };
        median(&(0..count).map(&mut one).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[9.0, 1.0, 2.0, 3.0]), 2.5);
    }

    /// Nine values of a uniform distribution, again and again: the interval is to have its median in it
    /// about as often as it says.
    #[test]
    fn the_interval_covers_the_true_median_as_often_as_it_says() {
        let mut draw = Draw(7);
        let uniform = |_| draw.next() as f64 / u64::MAX as f64;
        let samples: Vec<f64> = (0..9 * 400).map(uniform).collect();
        let covered = samples
            .chunks(9)
            .filter(|sample| {
                let Interval { low, high, .. } = interval(sample);
                (low..=high).contains(&0.5)
            })
            .count();
        assert!((360..=398).contains(&covered), "{covered} of 400");
    }

    #[test]
    fn a_difference_is_as_sure_as_the_values_are() {
        let base = [100.0, 101.0, 99.0, 100.0, 102.0];
        let more = base.map(|value| value * 1.5);
        let found = relative(&more, &base).unwrap();
        assert!((found.median - 0.5).abs() < 1e-9 && found.low > 0.4 && found.high < 0.6);
        let same = relative(&base, &base).unwrap();
        assert!(same.low < 0.0 && same.high > 0.0, "{same:?}");
        assert_eq!(relative(&base, &[0.0]), None);
    }

    proptest! {
        #[test]
        fn an_interval_has_its_median_and_stays_within_the_values(
            values in prop::collection::vec(-1e9_f64..1e9, 1..12)
        ) {
            let Interval { median, low, high } = interval(&values);
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            prop_assert!(least <= low && low <= median && median <= high && high <= most);
        }
    }
}
