//! The corpus of each target, and a while of mutations of it, always the same ones.

use std::sync::{Arc, Mutex};

use pollux_fuzz::engine::{Engine, read_corpus};
use pollux_fuzz::targets;

/// Mutations of each target.
const EXECUTIONS: u64 = 1500;

/// Tells the input if the target panics.
struct Tell(Arc<Mutex<Vec<u8>>>);

impl Drop for Tell {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let input = self.0.lock().unwrap();
            let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("the input, in hexadecimal (xxd -r -p makes a file of it): {hex}");
        }
    }
}

fn replay(name: &str) {
    let directory = targets::corpus(name);
    let inputs = read_corpus(&directory).unwrap();
    assert!(!inputs.is_empty(), "{} is empty", directory.display());
    let current = Arc::new(Mutex::new(Vec::new()));
    let _tell = Tell(current.clone());
    let mut engine = Engine::new(targets::find(name).unwrap(), 1);
    engine.note(move |input| input.clone_into(&mut current.lock().unwrap()));
    inputs.into_iter().for_each(|input| engine.seed(input));
    for _ in 0..EXECUTIONS {
        engine.step().unwrap();
    }
}

#[test]
fn rings() {
    replay("rings");
}

#[test]
fn pci_config() {
    replay("pci-config");
}

#[test]
fn common_config() {
    replay("common-config");
}

#[test]
fn apic() {
    replay("apic");
}

#[test]
fn loader() {
    replay("loader");
}

#[test]
fn disk() {
    replay("disk");
}

#[test]
fn control() {
    replay("control");
}

#[test]
fn exits() {
    replay("exits");
}
