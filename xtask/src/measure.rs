//! Guests that are run for their figures: what `pollux run --stats -` says of each.

use std::ffi::OsString;
use std::time::Duration;

use serde_json::Value as Json;

use crate::lab::{Lab, Options, Outcome, Stream};
use crate::util::{self, Context, Error, Result, bail, step};

/// How a script of several guests starts: with a directory of its own, `$dir`.
pub const SCRIPT_START: &str = "dir=$(mktemp -d); trap 'rm -rf $dir' EXIT\n";

/// A shell command that boots the stock guest, with its statistics on standard output. More options
/// follow.
pub fn stock_guest() -> String {
    let (pollux, guest) = (util::target_dir().join("release/pollux"), util::guest_dir());
    format!(
        "'{pollux}' run --kernel '{guest}/vmlinuz-6.12' --initrd '{guest}/initrd-6.12.img' \
         --disk 'path={guest}/rootfs.ext4,readonly=on' --console off --results $dir/results --stats -",
        pollux = pollux.display(),
        guest = guest.display(),
    )
}

/// A guest did not report what it should; `reported`: what is there of that.
pub fn missing(document: &Json, reported: &Json) -> Error {
    Error(format!(
        "a guest did not report its figures: end {}, its command's exit status {}, {reported}",
        document["end"], document["guest_exit_status"]
    ))
}

/// Where CPUs of the emulated machine run at the same time: one that polls does not keep another from
/// its work, as it does where they take turns. An interrupt may be lost there, and a guest be stuck.
const PARALLEL: &str = "tcg,thread=multi";

/// How long a guest may take before it is called stuck.
const GUEST_LIMIT: Duration = Duration::from_secs(60);

/// Runs a shell script, which runs `count` guests one after the other in one place, and gives the
/// documents that they leave on its output; see [`output`].
///
/// # Errors
/// A guest did not run.
pub fn documents(lab: &Lab, script: &str, count: usize) -> Result<Vec<Json>> {
    let documents = output(lab, script, count)?;
    let documents = serde_json::Deserializer::from_slice(&documents)
        .into_iter::<Json>()
        .collect::<std::result::Result<Vec<_>, _>>()
        .context("the statistics of pollux")?;
    if documents.len() != count {
        bail!("{} guests reported, not {count}", documents.len());
    }
    Ok(documents)
}

/// Runs a shell script, which runs `count` guests, and gives its output. On the emulated machine its
/// CPUs run at the same time; if a guest is stuck there, all run again where they take turns.
///
/// # Errors
/// A guest did not run.
pub fn output(lab: &Lab, script: &str, count: usize) -> Result<Vec<u8>> {
    let timeout = GUEST_LIMIT * u32::try_from(count).unwrap_or(u32::MAX);
    let turns = Options { scratch_mib: 0, timeout, ..Options::default() };
    let parallel = Options { accel: PARALLEL.into(), no_retry: true, ..turns.clone() };
    let (mut outcome, mut written) = attempt(lab, &parallel, script)?;
    if matches!(lab, Lab::Emulated(_))
        && matches!(outcome, Outcome::TimedOut | Outcome::LabFailed(_))
    {
        step(
            "again, and the emulated machine's CPUs take turns now: figures of polling are worse than true",
        );
        (outcome, written) = attempt(lab, &turns, script)?;
    }
    if outcome != Outcome::Exited(0) {
        bail!("the guests did not run: {outcome:?}");
    }
    Ok(written)
}

/// Runs the script; gives what it wrote to standard output.
fn attempt(lab: &Lab, options: &Options, script: &str) -> Result<(Outcome, Vec<u8>)> {
    let shell: Vec<OsString> = ["sh", "-ec", script].map(OsString::from).to_vec();
    let mut written = Vec::new();
    let (outcome, _) = lab.run(options, &shell, &mut |stream, bytes| match stream {
        Stream::Out => written.extend_from_slice(bytes),
        Stream::Err => eprint!("{}", String::from_utf8_lossy(bytes)),
    })?;
    Ok((outcome, written))
}

/// How much a counter grew between two marks: the sum of `of` over all elements of `member`.
pub fn between(
    document: &Json,
    marks: [&str; 2],
    member: &str,
    of: impl Fn(&Json) -> Option<f64>,
) -> Option<f64> {
    let at = |name: &str| {
        let mark = document["marks"].as_array()?.iter().find(|found| found["name"] == name)?;
        mark[member].as_array()?.iter().map(&of).sum::<Option<f64>>()
    };
    Some(at(marks[1])? - at(marks[0])?)
}

/// What the document says in words, which belongs below every table.
pub fn notes(document: &Json) -> Vec<String> {
    let notes = document["notes"].as_array().into_iter().flatten();
    notes.filter_map(|note| note.as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_was_counted_between_two_marks_is_summed_over_all_vcpus() {
        let mark = |name: &str, exits: [u32; 2]| json!({ "name": name, "vcpus": exits.map(|exits| json!({ "exits": exits })) });
        let document = json!({ "marks": [mark("a", [1, 10]), mark("b", [3, 40])] });
        let exits = |vcpu: &Json| vcpu["exits"].as_f64();
        assert_eq!(between(&document, ["a", "b"], "vcpus", exits), Some(32.0));
        assert_eq!(between(&document, ["a", "c"], "vcpus", exits), None);
        assert_eq!(between(&document, ["a", "b"], "vcpus", |vcpu| vcpu["x"].as_f64()), None);
    }
}
