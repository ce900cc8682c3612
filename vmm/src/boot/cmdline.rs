//! The kernel command line.

use thiserror::Error;

/// What every guest gets before the user's text: the console on COM1, reboot by the keyboard
/// controller (no probing of firmware), and a reboot at once when the kernel panics, so that the
/// monitor sees it.
pub const DEFAULT: &str = "console=ttyS0 reboot=k panic=-1";

/// Longest command line, without its NUL, for a kernel that does not say (x86's
/// `COMMAND_LINE_SIZE` is 2048).
pub const DEFAULT_MAX_BYTES: usize = 2047;

/// Why a command line cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CmdlineError {
    /// A character the kernel would not take as text.
    #[error(
        "kernel command line: {character:?} at byte {offset} is not allowed, only printable ASCII \
         and tabs are"
    )]
    BadCharacter {
        /// The character.
        character: char,
        /// Where it stands in the user's text, in bytes from 0.
        offset: usize,
    },
    /// Longer than the kernel takes.
    #[error("kernel command line: {bytes} bytes, but this kernel takes at most {max_bytes}")]
    TooLong {
        /// Its length in bytes, without the NUL, defaults included.
        bytes: usize,
        /// The kernel's limit in bytes, without the NUL.
        max_bytes: usize,
    },
}

/// [`DEFAULT`] followed by `extra` (Pollux's own parameters) and `user`. For the kernel the last of
/// equal parameters wins, so the user's do. What follows `--` in `user` goes to init and stays last.
///
/// # Errors
/// [`CmdlineError::BadCharacter`].
pub fn compose(extra: &str, user: &str) -> Result<String, CmdlineError> {
    let bad = user.char_indices().find(|(_, c)| !matches!(c, ' '..='~' | '\t'));
    if let Some((offset, character)) = bad {
        return Err(CmdlineError::BadCharacter { character, offset });
    }
    Ok([DEFAULT, extra, user].map(str::trim).into_iter().filter(|s| !s.is_empty()).fold(
        String::new(),
        |mut line, part| {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(part);
            line
        },
    ))
}

/// Checks the whole command line against the kernel's limit.
///
/// # Errors
/// [`CmdlineError::TooLong`].
pub fn check_length(cmdline: &str, max_bytes: usize) -> Result<(), CmdlineError> {
    let bytes = cmdline.len();
    if bytes > max_bytes {
        return Err(CmdlineError::TooLong { bytes, max_bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_text_follows_the_defaults_so_that_it_wins() {
        assert_eq!(compose("", "").as_deref(), Ok(DEFAULT));
        assert_eq!(
            compose("", "quiet panic=5").unwrap(),
            "console=ttyS0 reboot=k panic=-1 quiet panic=5"
        );
    }

    #[test]
    fn own_parameters_stand_before_the_users_and_before_the_separator() {
        assert_eq!(
            compose("idle=halt", " root=/dev/vda -- single ").unwrap(),
            "console=ttyS0 reboot=k panic=-1 idle=halt root=/dev/vda -- single"
        );
    }

    #[test]
    fn only_printable_ascii_and_tabs_are_taken() {
        for (text, character, offset) in
            [("a\nb", '\n', 1), ("\0", '\0', 0), ("é", 'é', 0), ("ab\x7f", '\x7f', 2)]
        {
            let refused = Err(CmdlineError::BadCharacter { character, offset });
            assert_eq!(compose("", text), refused, "{text:?}");
        }
        assert!(compose("", "a\t\"b c\"").is_ok());
    }

    #[test]
    fn the_limit_itself_fits_and_one_more_does_not() {
        assert_eq!(check_length("12345", 5), Ok(()));
        let error = check_length("123456", 5).unwrap_err();
        assert_eq!(
            error.to_string(),
            "kernel command line: 6 bytes, but this kernel takes at most 5"
        );
    }
}
