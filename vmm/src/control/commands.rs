//! What the requests on the control socket mean. They change the configuration of the run, so that
//! the statistics tell what is in force, and a guest that is restarted keeps it.

use std::collections::BTreeMap;
use std::process;
use std::sync::{Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use crate::config::{HostParameter, VmConfig, one_line, reason};
use crate::input::PortInput;
use crate::lifecycle::{End, Lifecycle};
use crate::record::Recorder;
use crate::stats::channel::GuestReport;
use crate::stats::{Snapshot, Sources, report};
use crate::tuning::HostTuning;
use crate::vcpu::polling::Polling;

/// A request.
#[derive(Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
enum Request {
    Status {},
    Stats {},
    Resize { disk: String },
    Set { parameters: BTreeMap<String, Json> },
    Send { line: String },
    Stop {},
}

/// A VM that runs, as far as requests reach it.
pub struct Live<'a> {
    /// What is in force.
    pub config: &'a mut VmConfig,
    /// The figures, and the disks.
    pub sources: &'a Sources,
    /// What the guest has reported.
    pub guest: &'a Mutex<GuestReport>,
    /// The results channel, if there is one.
    pub results: Option<&'a PortInput>,
    /// How it ends.
    pub lifecycle: &'a Lifecycle,
    /// Who polls for its halted vCPUs.
    pub polling: &'a Polling,
    /// The host's parameters.
    pub tuning: &'a HostTuning,
    /// Where halts are recorded, if they are.
    pub recorder: Option<&'a Recorder>,
    /// Takes a snapshot of all figures, which disturbs the guest a little.
    pub snapshot: &'a dyn Fn() -> Snapshot,
}

impl Live<'_> {
    /// Answers a request: one line, without its end.
    pub fn answer(&mut self, line: &[u8]) -> Json {
        let done = serde_json::from_slice(line).map_err(|why| format!("not a request: {why}"));
        match done.and_then(|request| self.carry_out(request)) {
            Ok(mut reply) => {
                reply.insert("ok".into(), true.into());
                Json::Object(reply)
            }
            Err(why) => json!({ "ok": false, "error": one_line(&why) }),
        }
    }

    /// The document of `--stats` so far.
    pub fn stats(&self) -> Json {
        let last = (self.snapshot)();
        let guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        let recording = self.recorder.map(Recorder::figures);
        report::report(self.config, &guest, &last, recording, None)
    }

    fn carry_out(&mut self, request: Request) -> Result<Map<String, Json>, String> {
        let reply = match request {
            Request::Status {} => self.status(),
            Request::Stats {} => json!({ "stats": self.stats() }),
            Request::Resize { disk } => self.resize(&disk)?,
            Request::Set { parameters } => self.set(&parameters)?,
            Request::Send { line } => self.send(&line)?,
            Request::Stop {} => {
                self.lifecycle.finish(End::Stopped("the control socket".into()));
                json!({ "state": "stopping" })
            }
        };
        let Json::Object(reply) = reply else { return Err("no reply".into()) };
        Ok(reply)
    }

    fn status(&self) -> Json {
        let config = &*self.config;
        let end = self.lifecycle.ended();
        let disks = config.disks.iter().zip(&self.sources.disks).map(|(disk, source)| {
            json!({
                "name": source.name,
                "path": disk.path.to_string_lossy(),
                "readonly": disk.readonly,
                "capacity_bytes": source.device.capacity_bytes(),
            })
        });
        json!({
            "state": if end.is_some() { "ended" } else { "running" },
            "end": end.as_ref().map(report::end),
            "pid": process::id(),
            "uptime_ns": self.sources.start.elapsed().as_nanos() as u64,
            "halt": config.halt,
            "cpus": config.cpus,
            "memory_bytes": config.memory_bytes,
            "disks": disks.collect::<Vec<_>>(),
        })
    }

    fn resize(&self, name: &str) -> Result<Json, String> {
        let disks = &self.sources.disks;
        let disk =
            disks.iter().find(|disk| disk.name == name).ok_or_else(|| match disks.len() {
                0 => format!("resize {name}: this guest has no disk"),
                1 => format!("resize {name}: no such disk (use blk0)"),
                count => format!("resize {name}: no such disk (use blk0 to blk{})", count - 1),
            })?;
        let sizes = disk
            .device
            .rescan()
            .map_err(|why| format!("resize {name}: its size cannot be told: {}", reason(&why)))?;
        Ok(json!({
            "disk": name,
            "old_capacity_bytes": sizes.old_bytes,
            "new_capacity_bytes": sizes.new_bytes,
        }))
    }

    /// A line for the guest, on the second serial port. It is sent as the guest reads.
    fn send(&self, line: &str) -> Result<Json, String> {
        let results =
            self.results.ok_or("send: this guest has no second serial port (--results PATH)")?;
        if line.contains('\n') {
            return Err("send: more than one line".into());
        }
        if !results.push(format!("{line}\n").as_bytes()) {
            return Err("send: the guest has not read what was sent before".into());
        }
        Ok(json!({ "sent_bytes": line.len() + 1 }))
    }

    /// All of it is checked before any of it is done.
    fn set(&mut self, parameters: &BTreeMap<String, Json>) -> Result<Json, String> {
        if parameters.is_empty() {
            return Err("set: no parameters".into());
        }
        let mut wanted = self.config.clone();
        for (name, value) in parameters {
            let text = match value {
                Json::String(text) => text.clone(),
                other => other.to_string(),
            };
            wanted.set(name, &text).map_err(|why| why.to_string())?;
        }
        let asked = |name: &str| parameters.contains_key(name);
        let host: Vec<HostParameter> = wanted
            .host_parameters()
            .into_iter()
            .filter(|parameter| asked(parameter.name))
            .collect();
        self.tuning.set(&host).map_err(|why| why.to_string())?;
        self.polling.set(&wanted.halt_poll).map_err(|why| why.to_string())?;
        if let (Some(recorder), Some(max_ns)) = (self.recorder, wanted.halt_poll.halt_poll_ns) {
            recorder.set_max_ns(max_ns);
        }
        for disk in &self.sources.disks {
            disk.device.set_io_poll_ns(wanted.io_poll_ns);
        }
        *self.config = wanted;
        let in_force = serde_json::to_value(&*self.config).unwrap_or_default();
        let set: Map<String, Json> = parameters
            .keys()
            .map(|name| (name.clone(), in_force.get(name).cloned().unwrap_or_default()))
            .collect();
        Ok(json!({ "set": set }))
    }
}
