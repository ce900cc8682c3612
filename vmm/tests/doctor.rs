//! `pollux doctor`: the same findings as text and as JSON, and an exit status that is the answer.

use std::process::{Command, Output};

use serde_json::Value;

fn doctor(options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pollux")).arg("doctor").args(options).output().unwrap()
}

fn json(output: &Output) -> Value {
    assert_eq!(output.stderr, b"");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn names<'a>(list: &'a Value, key: &str) -> Vec<&'a str> {
    list.as_array().unwrap().iter().map(|entry| entry[key].as_str().unwrap()).collect()
}

#[test]
fn the_exit_status_is_the_answer_and_follows_from_the_findings() {
    let output = doctor(&["--json"]);
    let report = json(&output);
    let kvm = &report["kvm"];
    assert!(kvm.get("problem").is_none(), "this test needs /dev/kvm: {kvm}");
    assert_eq!(kvm["api_version"], 12);

    let tiny = kvm["tiny_guests"].as_array().unwrap();
    let good = |run: &Value| matches!(run["result"].as_str(), Some("ok" | "not_offered"));
    let lacking =
        |capability: &&Value| capability["need"] == "required" && capability["present"] == false;
    let capabilities = kvm["capabilities"].as_array().unwrap();
    let can_run = tiny.iter().all(good) && capabilities.iter().find(lacking).is_none();
    assert_eq!(report["can_run_stock_kernel"], can_run, "{report}");
    assert_eq!(output.status.code(), Some(i32::from(!can_run)));
    assert_eq!(report["problems"].as_array().unwrap().is_empty(), can_run);
}

#[test]
fn every_finding_has_its_field() {
    let report = json(&doctor(&["--json"]));
    assert_eq!(report["schema"], 1);
    assert_eq!(
        names(&report["kvm"]["tiny_guests"], "name"),
        ["long_mode", "cmpxchg16b", "int3", "fxrstor", "xrstor"]
    );
    let capabilities = names(&report["kvm"]["capabilities"], "name");
    for name in ["KVM_CAP_IRQCHIP", "KVM_CAP_IRQFD", "KVM_CAP_HALT_POLL", "KVM_CAP_IMMEDIATE_EXIT"]
    {
        assert!(capabilities.contains(&name), "{name}");
    }
    for name in ["halt_poll_ns_grow", "halt_poll_ns_grow_start", "halt_poll_ns_shrink"] {
        assert!(report["halt_poll"].get(name).is_some(), "{name}");
    }
    // As the module says it, unless somebody changes it meanwhile.
    let parameter = std::fs::read_to_string("/sys/module/kvm/parameters/halt_poll_ns").unwrap();
    assert_eq!(report["halt_poll"]["halt_poll_ns"].to_string(), parameter.trim());
    let modes = &report["kvm"]["halt_modes"];
    assert_eq!(names(modes, "mode"), ["kernel", "user", "passthrough"]);
    for mode in modes.as_array().unwrap() {
        assert_eq!(mode["usable"] == true, mode.get("problem").is_none(), "{mode}");
    }
    assert!(report["io_uring"]["usable"].is_boolean());
    assert!(report["host"]["kernel"].is_string());
}

#[test]
fn whatever_is_missing_comes_with_what_to_do() {
    let report = json(&doctor(&["--json"]));
    let problems = report["problems"].as_array().unwrap();
    let missing = report["kvm"]["capabilities"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|capability| capability["present"] == false);
    for finding in problems.iter().chain(missing) {
        assert!(finding["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{finding}");
    }
}

#[test]
fn the_text_ends_in_the_answer() {
    let output = doctor(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    for name in ["cmpxchg16b", "int3", "fxrstor", "xrstor", "KVM_CAP_IRQFD", "--halt passthrough"] {
        assert!(text.contains(name), "{name}: {text}");
    }
    let answer = text.contains("\nThis KVM can run a stock kernel.\n");
    let refusal = text.contains("\nThis host cannot run a stock kernel:\n");
    assert_eq!(
        (answer, refusal),
        if output.status.success() { (true, false) } else { (false, true) }
    );
}

#[test]
fn no_kvm_is_a_finding_and_no_usage_error() {
    for (device, problem, advice) in [
        ("/nonexistent/kvm", "no such file", "kvm_intel or kvm_amd"),
        ("/dev/null", "not a KVM device", "/dev/kvm"),
    ] {
        let output = doctor(&["--kvm", device]);
        assert_eq!(output.status.code(), Some(1), "{device}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(problem) && text.contains(advice), "{text}");

        let report = json(&doctor(&["--kvm", device, "--json"]));
        assert_eq!(report["can_run_stock_kernel"], false);
        assert!(report["problems"][0]["problem"].as_str().unwrap().contains(problem), "{report}");
    }
}
