//! The program `pollux`.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmm::main()
}
