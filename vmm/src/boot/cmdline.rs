//! What a kernel command line must be.

use thiserror::Error;

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
        /// Where it stands, in bytes from 0.
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

/// Checks the whole command line against a kernel's limit, in bytes without the NUL.
///
/// # Errors
/// [`CmdlineError`].
pub fn check(cmdline: &str, max_bytes: usize) -> Result<(), CmdlineError> {
    let bad = cmdline.char_indices().find(|(_, c)| !matches!(c, ' '..='~' | '\t'));
    if let Some((offset, character)) = bad {
        return Err(CmdlineError::BadCharacter { character, offset });
    }
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
    fn only_printable_ascii_and_tabs_are_taken() {
        for (text, character, offset) in
            [("a\nb", '\n', 1), ("\0", '\0', 0), ("é", 'é', 0), ("ab\x7f", '\x7f', 2)]
        {
            assert_eq!(
                check(text, 100),
                Err(CmdlineError::BadCharacter { character, offset }),
                "{text:?}"
            );
        }
        assert_eq!(check("a\t\"b c\" -- ~", 100), Ok(()));
    }

    #[test]
    fn the_limit_itself_fits_and_one_more_does_not() {
        assert_eq!(check("12345", 5), Ok(()));
        let error = check("123456", 5).unwrap_err();
        assert_eq!(
            error.to_string(),
            "kernel command line: 6 bytes, but this kernel takes at most 5"
        );
    }
}
