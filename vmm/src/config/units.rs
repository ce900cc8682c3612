//! Numbers with units: sizes and times, and the other scalar values of options.

use super::ConfigError;

/// Parses a size in bytes: plain bytes, or a number with `K`, `M` or `G` (powers of 1024).
///
/// # Errors
/// It is no size, or more than 64 bits.
pub fn size_bytes(option: &'static str, text: &str) -> Result<u64, ConfigError> {
    let (digits, unit) = split_unit(text);
    let factor: u64 = match unit {
        "" => 1,
        "K" | "k" => 1 << 10,
        "M" | "m" => 1 << 20,
        "G" | "g" => 1 << 30,
        _ => return Err(bad_size(option, text)),
    };
    let number = decimal(digits).ok_or_else(|| bad_size(option, text))?;
    number.and_then(|number| number.checked_mul(factor)).ok_or_else(|| {
        ConfigError::new(option, text, "more than 64 bits can hold").hint("use a smaller size")
    })
}

/// Parses a time in nanoseconds of at most `u32::MAX`, which is the width of the kernel's
/// parameters: plain nanoseconds, or a number with `ns`, `us`, `ms` or `s`.
///
/// # Errors
/// It is no time, or longer.
pub fn time_ns(option: &'static str, text: &str) -> Result<u32, ConfigError> {
    u32::try_from(long_time_ns(option, text)?).map_err(|_| {
        ConfigError::new(option, text, "too long")
            .hint("use at most 4294967295 ns, which is about 4 s")
    })
}

/// Parses a time in nanoseconds of 64 bits, in the same form.
///
/// # Errors
/// It is no time, or longer.
pub fn long_time_ns(option: &'static str, text: &str) -> Result<u64, ConfigError> {
    let bad = || {
        ConfigError::new(option, text, "not a time")
            .hint("use nanoseconds, or a number with us, ms or s, as 200us")
    };
    let (digits, unit) = split_unit(text);
    let factor: u64 = match unit {
        "" | "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return Err(bad()),
    };
    let number = decimal(digits).ok_or_else(bad)?;
    number
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| ConfigError::new(option, text, "too long").hint("use less than 2^64 ns"))
}

/// Parses a plain decimal number of 32 bits.
///
/// # Errors
/// It is none, or larger.
pub fn number(option: &'static str, text: &str) -> Result<u32, ConfigError> {
    decimal(text)
        .ok_or_else(|| ConfigError::new(option, text, "not a number").hint("use decimal digits"))?
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| ConfigError::new(option, text, "too large").hint("use at most 4294967295"))
}

/// Parses one of the words in `choices`.
///
/// # Errors
/// It is another.
pub fn choice<T: Copy>(
    option: &'static str,
    text: &str,
    choices: &[(&str, T)],
) -> Result<T, ConfigError> {
    choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        ConfigError::new(option, text, "not one of its values")
            .hint(format!("use {}", alternatives(&words)))
    })
}

/// Parses `on` or `off`.
///
/// # Errors
/// It is neither.
pub fn switch(option: &'static str, text: &str) -> Result<bool, ConfigError> {
    choice(option, text, &[("on", true), ("off", false)])
}

/// "a", "a or b", "a, b or c".
pub fn alternatives(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [word] => (*word).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

fn bad_size(option: &'static str, text: &str) -> ConfigError {
    ConfigError::new(option, text, "not a size")
        .hint("use bytes, or a number with K, M or G, as 512M")
}

fn split_unit(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

/// `None`: not a number. `Some(None)`: a number, but not one of 64 bits.
fn decimal(digits: &str) -> Option<Option<u64>> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_binary_multiples() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1K", 1024),
            ("64k", 65536),
            ("512M", 512 << 20),
            ("4G", 4 << 30),
        ] {
            assert_eq!(size_bytes("--memory", text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_the_right_form() {
        for text in ["", "M", "12Q", "1.5G", "-1", "+1", "512MB", "512 M", "0x10", "1G1", "١M"] {
            let message = size_bytes("--memory", text).unwrap_err().to_string();
            assert!(message.starts_with("--memory "), "{message}");
            assert!(message.contains("not a size") && message.contains("512M"), "{message}");
        }
    }

    #[test]
    fn sizes_and_times_past_their_width_are_refused() {
        for text in ["18446744073709551616", "17179869184G", "99999999999999999999999"] {
            assert!(size_bytes("--memory", text).unwrap_err().to_string().contains("64 bits"));
        }
        for text in ["4294967296", "5s", "18446744073709551616", "18446744073709551615s"] {
            assert!(time_ns("--halt-poll-ns", text).unwrap_err().to_string().contains("too long"));
        }
        assert_eq!(time_ns("--halt-poll-ns", "4294967295").unwrap(), u32::MAX);
    }

    #[test]
    fn times_are_nanoseconds_unless_they_say_otherwise() {
        for (text, ns) in
            [("0", 0), ("200000", 200_000), ("50ns", 50), ("200us", 200_000), ("1ms", 1_000_000)]
        {
            assert_eq!(time_ns("--halt-poll-ns", text).unwrap(), ns, "{text}");
        }
        for text in ["", "us", "1m", "1US", "-1", "1.5ms", "200 us"] {
            assert!(time_ns("--halt-poll-ns", text).unwrap_err().to_string().contains("200us"));
        }
    }

    #[test]
    fn numbers_have_digits_and_32_bits() {
        assert_eq!(number("--cpus", "4294967295").unwrap(), u32::MAX);
        for text in ["", "two", "-1", "1K", "4294967296", "99999999999999999999"] {
            assert!(number("--cpus", text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_refused_word_is_answered_with_the_words_there_are() {
        let message = switch("--disk", "yes").unwrap_err().to_string();
        assert_eq!(message, "--disk yes: not one of its values (use on or off)");
        assert_eq!(alternatives(&["a", "b", "c"]), "a, b or c");
    }
}
