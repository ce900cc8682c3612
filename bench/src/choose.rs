//! What is worth measuring: replays the halts of settings that do not poll with the parameters of the
//! others, and leaves out those that are predicted to be beaten.

use halt_poll::recording::Recording;
use halt_poll::{guest, replay};
use serde_json::Value as Json;

use crate::setting::{AXES, Place, Setting};

/// Most settings of a workload that are measured after the ones that do not poll.
const MOST: usize = 6;

/// A setting that was measured and recorded, and does not poll.
pub struct Scout<'a> {
    /// Which setting.
    pub setting: &'a Setting,
    /// Its halts while the workload ran.
    pub recording: &'a Recording,
    /// How many requests that were.
    pub requests: f64,
    /// Its mean latency.
    pub latency_us: f64,
    /// The host's CPU time a request.
    pub cost_us: f64,
}

/// What a setting is expected to come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Mean latency.
    pub latency_us: f64,
    /// The host's CPU time a request.
    pub cost_us: f64,
}

/// Whether nobody polls in this setting, so that its halts show how long the guest was idle.
pub fn is_scout(setting: &Setting) -> bool {
    let is = |axis: &str, values: &[&str]| {
        setting.0.get(axis).is_some_and(|value| values.contains(&value.as_str()))
    };
    is("halt_poll_ns", &["0"]) && is("guest_idle", &["halt"]) && is("halt", &["kernel", "user"])
}

/// Whether the recorded halts of `scout` say something of `setting`: they differ in polling only.
pub fn fits(scout: &Setting, setting: &Setting) -> bool {
    let polling = |name: &str| {
        name == "guest_idle"
            || AXES
                .iter()
                .any(|axis| axis.name == name && matches!(axis.is, Place::Guest | Place::Host))
                && name != "io_poll_ns"
    };
    let rest = |setting: &Setting| {
        let mut rest = setting.0.clone();
        rest.retain(|name, _| !polling(name));
        rest
    };
    let idles = ["halt", "haltpoll"].map(str::to_owned);
    setting.0.get("guest_idle").is_some_and(|idle| idles.contains(idle))
        && rest(scout) == rest(setting)
}

/// What a setting would come to. `config`: as Pollux understands it. None: the recording does not tell,
/// for nothing slept in it.
pub fn predict(scout: &Scout<'_>, config: &Json) -> Option<Prediction> {
    let wake_cost_ns = scout.recording.wake_cost_ns()?;
    let number = |value: &Json, default: u32| {
        value.as_u64().and_then(|value| u32::try_from(value).ok()).unwrap_or(default)
    };
    let mut host = scout.recording.header.host;
    host.max_ns = number(&config["halt_poll_ns"], host.max_ns);
    host.grow = number(&config["halt_poll_ns_grow"], host.grow);
    host.grow_start_ns = number(&config["halt_poll_ns_grow_start"], host.grow_start_ns);
    host.shrink = number(&config["halt_poll_ns_shrink"], host.shrink);
    let given = &config["guest_halt_poll"];
    let defaults = guest::Params::default();
    let governor = guest::Params {
        guest_halt_poll_ns: number(&given["guest_halt_poll_ns"], defaults.guest_halt_poll_ns),
        guest_halt_poll_grow: number(&given["guest_halt_poll_grow"], defaults.guest_halt_poll_grow),
        guest_halt_poll_grow_start: number(
            &given["guest_halt_poll_grow_start"],
            defaults.guest_halt_poll_grow_start,
        ),
        guest_halt_poll_shrink: number(
            &given["guest_halt_poll_shrink"],
            defaults.guest_halt_poll_shrink,
        ),
        guest_halt_poll_allow_shrink: given["guest_halt_poll_allow_shrink"]
            .as_bool()
            .unwrap_or(defaults.guest_halt_poll_allow_shrink),
    };
    let governor = (config["guest_idle"] == "haltpoll").then_some(governor);
    let simulate = |host, governor| {
        replay::total(&replay::simulate(scout.recording, host, governor, wake_cost_ns))
    };
    let now = simulate(host, governor);
    host.max_ns = 0;
    let without = simulate(host, None);
    let a_request = |ns: u64| ns as f64 / 1e3 / scout.requests;
    let saved_us = a_request(without.added_latency_ns) - a_request(now.added_latency_ns);
    Some(Prediction {
        latency_us: (scout.latency_us - saved_us).max(0.0),
        cost_us: scout.cost_us + a_request(now.polled_ns()),
    })
}

/// Of predicted settings the ones to measure: those that no other is predicted to beat in both, at most
/// [`MOST`] of them, those with the least product of both first.
pub fn choose(predicted: &[(usize, Prediction)]) -> Vec<usize> {
    let beaten = |one: &Prediction| {
        predicted.iter().any(|(_, other)| {
            other.latency_us <= one.latency_us
                && other.cost_us <= one.cost_us
                && (other.latency_us < one.latency_us || other.cost_us < one.cost_us)
        })
    };
    let mut frontier: Vec<&(usize, Prediction)> =
        predicted.iter().filter(|(_, prediction)| !beaten(prediction)).collect();
    frontier.sort_by(|(_, a), (_, b)| {
        (a.latency_us * a.cost_us).total_cmp(&(b.latency_us * b.cost_us))
    });
    frontier.iter().take(MOST).map(|(index, _)| *index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halt_poll::recording::{GuestIdle, Halt, Header, Mode};
    use halt_poll::{Outcome, Params, WakeReason};
    use serde_json::json;

    fn setting(values: &[(&str, &str)]) -> Setting {
        Setting(values.iter().map(|&(axis, value)| (axis.into(), value.into())).collect())
    }

    #[test]
    fn what_does_not_poll_tells_of_what_differs_in_polling() {
        let still = [("halt", "kernel"), ("guest_idle", "halt"), ("halt_poll_ns", "0")];
        let scout = setting(&still);
        assert!(is_scout(&scout));
        let with = |axis: &str, value: &str| scout.with(axis, value.into());
        for polls in [with("halt_poll_ns", "5"), with("guest_idle", "haltpoll")] {
            assert!(!is_scout(&polls) && fits(&scout, &polls));
        }
        for other in [
            with("halt", "user"),
            with("packed", "on"),
            with("io_poll_ns", "5"),
            with("guest_idle", "poll"),
        ] {
            assert!(!fits(&scout, &other), "{other}");
        }
    }

    fn recording_of_nothing() -> Recording {
        let header = Header {
            mode: Mode::Kernel,
            vcpus: 1,
            host: Params { max_ns: 0, grow: 2, grow_start_ns: 10_000, shrink: 2 },
            guest_idle: GuestIdle::Halt,
            deadline_lead_ns: 0,
        };
        Recording { header, vcpus: Vec::new(), lost: 0, truncated: false }
    }

    /// A thousand requests, each a halt of 100 us, after which waking cost 20 us.
    fn recording() -> Recording {
        let outcome = Outcome {
            polled_ns: None,
            blocked_ns: Some(120_000),
            wake: WakeReason::Event,
            valid: true,
        };
        let halts = (0..1000).map(|number| {
            let mut halt = Halt::new(number * 200_000, 0, &outcome);
            halt.wake_cost_ns = Some(20_000);
            halt
        });
        Recording { vcpus: vec![halts.collect()], ..recording_of_nothing() }
    }

    #[test]
    fn a_window_that_covers_the_wait_saves_the_wake_and_costs_the_wait() {
        let recording = recording();
        let scout = Scout {
            setting: &Setting::default(),
            recording: &recording,
            requests: 1000.0,
            latency_us: 150.0,
            cost_us: 30.0,
        };
        let predict = |config: Json| predict(&scout, &config).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 2.0;
        let none = predict(json!({ "halt_poll_ns": 0 }));
        assert!(near(none.latency_us, 150.0) && near(none.cost_us, 30.0), "{none:?}");
        let wide = predict(json!({ "halt_poll_ns": 400_000, "halt_poll_ns_grow_start": 400_000 }));
        assert!(near(wide.latency_us, 130.0) && near(wide.cost_us, 130.0), "{wide:?}");
        let guest = json!({
            "halt_poll_ns": 0, "guest_idle": "haltpoll",
            "guest_halt_poll": { "guest_halt_poll_ns": 300_000, "guest_halt_poll_grow_start": 300_000 }
        });
        let guest = predict(guest);
        assert!(near(guest.latency_us, 130.0) && near(guest.cost_us, 130.0), "{guest:?}");
    }

    #[test]
    fn only_what_nothing_beats_is_measured() {
        let at = |latency_us: f64, cost_us: f64| Prediction { latency_us, cost_us };
        let predicted =
            [(3, at(100.0, 10.0)), (4, at(100.0, 20.0)), (5, at(50.0, 30.0)), (6, at(60.0, 30.0))];
        assert_eq!(choose(&predicted), [3, 5]);
        let many: Vec<_> = (0..50).map(|n| (n, at(100.0 - n as f64, 10.0 + n as f64))).collect();
        assert_eq!(choose(&many).len(), MOST);
    }
}
