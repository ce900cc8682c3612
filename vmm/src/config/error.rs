//! The one shape of every complaint about the configuration.

use std::fmt;
use std::io;

/// A longer value of an option is shown in part.
const VALUE_MAX_CHARS: usize = 200;

/// What is wrong with an option, and what would be right. Displays as one line, whatever the
/// user's strings contain: `--memory 12Q: not a size (use bytes, or a number with K, M or G, as
/// 512M)`.
#[derive(Debug)]
pub struct ConfigError {
    option: &'static str,
    value: String,
    problem: String,
    hint: Option<String>,
}

impl ConfigError {
    /// An error about `value` of `option`: `--cpus`, or `--disk queues=` for a key of an option.
    pub fn new(option: &'static str, value: impl fmt::Display, problem: impl Into<String>) -> Self {
        Self { option, value: value.to_string(), problem: problem.into(), hint: None }
    }

    /// Adds what would be right.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blank = if self.option.ends_with('=') { "" } else { " " };
        let value = if self.value.is_empty() { "\"\"" } else { &shortened(&self.value) };
        write!(f, "{}{blank}{value}", self.option)?;
        write!(f, ": {}", one_line(&self.problem))?;
        match &self.hint {
            Some(hint) => write!(f, " ({})", one_line(hint)),
            None => Ok(()),
        }
    }
}

/// The beginning of a long value is enough to find it again.
fn shortened(value: &str) -> String {
    match value.char_indices().nth(VALUE_MAX_CHARS) {
        Some((end, _)) => format!("{}...", one_line(value.get(..end).unwrap_or_default())),
        None => one_line(value),
    }
}

/// Escapes control characters, so that what is printed stays on its line and leaves the terminal
/// alone.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

/// The system's words for `error`, without its number.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let words = text.split(" (os error").next().unwrap_or_default();
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_option_the_value_and_what_would_be_right() {
        let error = ConfigError::new("--cpus", "0", "no vCPU at all").hint("use at least 1");
        assert_eq!(error.to_string(), "--cpus 0: no vCPU at all (use at least 1)");
    }

    #[test]
    fn an_error_is_one_line_whatever_the_value_contains() {
        let error = ConfigError::new("--kernel", "a\nb\x1b[2J", "no\nsuch file");
        assert_eq!(error.to_string(), r"--kernel a\nb\u{1b}[2J: no\nsuch file");
    }

    #[test]
    fn a_value_without_end_is_shown_in_part() {
        let message = ConfigError::new("--cmdline", "\u{e4}".repeat(5000), "too long").to_string();
        assert_eq!(message.chars().count(), "--cmdline ...: too long".len() + VALUE_MAX_CHARS);
    }

    #[test]
    fn reasons_are_words_without_a_number() {
        let error = io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(reason(&error), "permission denied");
    }
}
