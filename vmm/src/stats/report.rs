//! The document of `--stats`; its form is `docs/stats.schema.json`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use super::channel::GuestReport;
use super::{SCHEMA, Snapshot, VcpuFigures};
use crate::config::{Halt, Stats, VmConfig};
use crate::doctor::host;
use crate::lifecycle::End;
use crate::record;

/// The whole document. `end`: how the run ended, if it has.
pub fn report(
    config: &VmConfig,
    guest: &GuestReport,
    last: &Snapshot,
    recording: Option<record::Figures>,
    end: Option<&End>,
) -> Json {
    json!({
        "schema": SCHEMA,
        "config": config,
        "host": host_report(),
        "end": end.map(self::end),
        "notes": notes(config.halt, &last.vcpus, end),
        "time_ns": last.time_ns,
        "vcpus": last.vcpus,
        "queues": last.queues,
        "workers": last.workers,
        "recording": recording,
        "guest": guest.reports,
        "guest_exit_status": guest.exit_status,
        "marks": guest.marks,
    })
}

/// How a run ended, with the program's exit status.
pub fn end(end: &End) -> Json {
    json!({ "how": end, "exit_status": end.exit_status() })
}

/// What the host is, with KVM's halt-polling parameters as they are now.
fn host_report() -> Json {
    let (host, modules) = &*host::HOST;
    json!({
        "kernel": host.kernel,
        "cpu": host.cpu,
        "cpus": host.cpus,
        "is_guest": host.is_guest,
        "kvm_modules": modules,
        "kvm_parameters": host::HaltPoll::query(),
    })
}

/// What the figures do not say by themselves, and surprises people, in words.
fn notes(halt: Halt, vcpus: &[VcpuFigures], end: Option<&End>) -> Vec<String> {
    let those = |what: fn(&VcpuFigures) -> bool| {
        let names: Vec<&str> =
            vcpus.iter().filter(|vcpu| what(vcpu)).map(|vcpu| vcpu.name.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let mut notes = Vec::new();
    if let Some(names) = those(|vcpu| vcpu.setup.polls_itself()) {
        notes.push(format!(
            "{names}: the guest switched host polling off (MSR_KVM_POLL_CONTROL), as its haltpoll \
             driver does: the host does not poll for it, whatever halt_poll_ns is"
        ));
    }
    // A guest that ended by itself has switched its local APIC off on the way.
    if matches!(end, None | Some(End::Stopped(_)))
        && let Some(names) = those(|vcpu| vcpu.setup.may_spin_on_page_faults())
    {
        notes.push(format!(
            "{names}: asynchronous page faults are on while the local APIC is off, so KVM cannot \
             tell the guest that a page came and does not let it halt: CPU time there is not polling"
        ));
    }
    if halt == Halt::Passthrough {
        notes.push(
            "--halt passthrough: HLT does not leave the guest, so no halts are counted, and a \
             vCPU's CPU time is also that of its idling"
                .to_owned(),
        );
    } else if halt == Halt::Kernel
        && let Some(names) = those(|vcpu| vcpu.halt.is_empty())
    {
        notes.push(format!(
            "{names}: this KVM has no binary statistics (Linux 5.14), so only exits that reached \
             Pollux are counted, and no halts"
        ));
    }
    notes
}

/// Writes `document` where the user wants it. A file changes from one whole document to the next.
///
/// # Errors
/// It cannot be written.
pub fn write(target: &Stats, document: &Json) -> io::Result<()> {
    let text = format!("{document:#}\n");
    match target {
        Stats::Stdout => io::stdout().write_all(text.as_bytes()),
        Stats::File(path) => replace(path, text.as_bytes()),
    }
}

/// Where statistics for `path` go, and whether they take the place of what is there: a link stays one;
/// a pipe or a device is not replaced by a file.
pub fn destination(path: &Path) -> (PathBuf, bool) {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let is_replaced = fs::symlink_metadata(&path).map_or(true, |metadata| metadata.is_file());
    (path, is_replaced)
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (path, is_replaced) = destination(path);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    // Where the directory takes no new file, a file that is there may still be written.
    let Some(mut file) = is_replaced.then(|| File::create(&temporary).ok()).flatten() else {
        // A FIFO that nobody reads is an error, not a hang.
        let mut options = File::options();
        options.write(true).create(true).truncate(true).custom_flags(libc::O_NONBLOCK);
        return options.open(path)?.write_all(bytes);
    };
    let done = file.write_all(bytes).and_then(|()| fs::rename(&temporary, &path));
    if done.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::super::sample::GuestSetup;
    use super::*;

    fn vcpu(name: &str, setup: GuestSetup) -> VcpuFigures {
        let halt = [("halt_wakeup".to_owned(), super::super::kvm::Value::Number(0))].into();
        VcpuFigures { name: name.to_owned(), setup, halt, ..VcpuFigures::default() }
    }

    #[test]
    fn a_guest_that_polls_itself_is_noted_by_its_vcpus() {
        let off = GuestSetup { poll_control: Some(0), ..GuestSetup::default() };
        let on = GuestSetup { poll_control: Some(1), ..GuestSetup::default() };
        let vcpus = [vcpu("vcpu0", off), vcpu("vcpu1", on), vcpu("vcpu2", off)];
        let notes = notes(Halt::Kernel, &vcpus, Some(&End::PowerOff));
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].starts_with("vcpu0, vcpu2: the guest switched host polling off"));
    }

    #[test]
    fn a_disabled_apic_with_page_faults_pending_is_told_from_polling() {
        let setup = GuestSetup {
            async_pf_control: Some(1),
            apic_enabled: Some(false),
            ..GuestSetup::default()
        };
        let vcpus = [vcpu("vcpu0", setup)];
        for end in [None, Some(&End::Stopped("SIGTERM".to_owned()))] {
            let notes = notes(Halt::Kernel, &vcpus, end);
            assert!(notes[0].contains("not polling"), "{notes:?}");
        }
        assert_eq!(notes(Halt::Kernel, &vcpus, Some(&End::PowerOff)), [""; 0], "it is shut down");
    }

    #[test]
    fn an_ordinary_run_has_nothing_to_note() {
        let vcpus = [vcpu("vcpu0", GuestSetup::default())];
        assert_eq!(notes(Halt::Kernel, &vcpus, None), [""; 0]);
        assert_eq!(notes(Halt::Passthrough, &vcpus, None).len(), 1);
        let bare = VcpuFigures::default();
        assert!(notes(Halt::Kernel, &[bare], None)[0].contains("binary statistics"));
    }

    #[test]
    fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("a"), directory.path().join("b"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for text in ["long, at first", "short"] {
            let before = File::open(&file).ok();
            replace(&link, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            if let Some(before) = before {
                assert_eq!(io::read_to_string(before).unwrap(), "long, at first", "still whole");
            }
        }
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_no_file_is_written_and_not_replaced() {
        replace(Path::new("/dev/null"), b"x").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
