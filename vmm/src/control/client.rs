//! `pollux ctl`: one request on a control socket.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;

use ::bench::control::{LIMIT, ask};
use serde_json::{Map, Value as Json, json};

use crate::cli::{CtlArgs, CtlCommand};
use crate::config::{ConfigError, one_line, reason};

/// Why there is nothing to print: one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// Bad arguments, or nobody listens: exit status 2.
    #[error(transparent)]
    Usage(#[from] ConfigError),
    /// It was refused, or there is no reply: exit status 1.
    #[error("{0}")]
    Refused(String),
}

impl CtlError {
    /// The program's exit status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Refused(_) => 1,
        }
    }
}

/// Sends the request and prints the reply.
///
/// # Errors
/// See [`CtlError`].
pub fn run(args: &CtlArgs) -> Result<(), CtlError> {
    let request = request(&args.command)?;
    let socket = UnixStream::connect(&args.socket).map_err(|why| {
        let hint = match why.kind() {
            ErrorKind::ConnectionRefused => "nobody listens there any more",
            _ => "name the PATH of pollux run --control PATH",
        };
        ConfigError::new("ctl", args.socket.display(), reason(&why)).hint(hint)
    })?;
    let reply = ask(&socket, &request).map_err(|why| {
        let why = match why.kind() {
            ErrorKind::WouldBlock => format!("none for {} s", LIMIT.as_secs()),
            _ => reason(&why),
        };
        CtlError::Refused(format!("no reply: {}", one_line(&why)))
    })?;
    if reply.get("ok") != Some(&Json::Bool(true)) {
        let why = reply.get("error").and_then(Json::as_str).unwrap_or("refused");
        return Err(CtlError::Refused(one_line(why)));
    }
    // Nobody to read it is no error of ours.
    let _ = writeln!(io::stdout(), "{reply:#}");
    Ok(())
}

fn request(command: &CtlCommand) -> Result<Json, ConfigError> {
    Ok(match command {
        CtlCommand::Status => json!({ "command": "status" }),
        CtlCommand::Stats => json!({ "command": "stats" }),
        CtlCommand::Resize { disk } => json!({ "command": "resize", "disk": disk }),
        CtlCommand::Set { parameters } => {
            let mut found = Map::new();
            for parameter in parameters {
                let (name, value) = parameter.split_once('=').ok_or_else(|| {
                    ConfigError::new("set", parameter, "has no value")
                        .hint("use NAME=VALUE, as halt_poll_ns=200us")
                })?;
                if found.insert(name.to_owned(), value.into()).is_some() {
                    return Err(ConfigError::new("set", parameter, "is given twice"));
                }
            }
            json!({ "command": "set", "parameters": found })
        }
        CtlCommand::Send { line } => json!({ "command": "send", "line": line }),
        CtlCommand::Stop => json!({ "command": "stop" }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(parameters: &[&str]) -> Result<Json, String> {
        let parameters = parameters.iter().map(|&parameter| parameter.to_owned()).collect();
        request(&CtlCommand::Set { parameters }).map_err(|why| why.to_string())
    }

    #[test]
    fn parameters_are_pairs_of_different_names() {
        let expected = json!({ "a": "1", "b": "2=3" });
        assert_eq!(set(&["a=1", "b=2=3"]).unwrap()["parameters"], expected);
        assert!(set(&["a"]).unwrap_err().starts_with("set a: has no value (use NAME=VALUE"));
        assert_eq!(set(&["a=1", "a=2"]).unwrap_err(), "set a=2: is given twice");
    }
}
