//! `--disk`: a virtio-blk disk and its keys.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use virtio_blk::{BlkConfig, CacheMode, DiskError, EngineKind};

use super::units::{choice, number, switch};
use super::{ConfigError, files, reason};

const OPTION: &str = "--disk";

const KEYS: [&str; 13] = [
    "path",
    "readonly",
    "queues",
    "queue-size",
    "engine",
    "direct",
    "cache",
    "discard",
    "serial",
    "event-idx",
    "packed",
    "block-size",
    "format",
];
const ENGINES: [(&str, EngineKind); 3] =
    [("uring", EngineKind::Uring), ("sync", EngineKind::Sync), ("null", EngineKind::Null)];
const CACHES: [(&str, CacheMode); 2] =
    [("writeback", CacheMode::Writeback), ("writethrough", CacheMode::Writethrough)];

const BLOCK_SIZES_BYTES: [(&str, u32); 2] = [("512", 512), ("4096", 4096)];

/// Parses one `--disk` value. Looks at no file: [`Disk::open`](virtio_blk::Disk::open) does.
pub(super) fn parse(spec: &str) -> Result<BlkConfig, ConfigError> {
    let mut disk = BlkConfig::default();
    let mut seen = Vec::new();
    for item in split_items(spec) {
        let Some((key, value)) = item.split_once('=') else {
            return Err(ConfigError::new(OPTION, spec, format!("\"{item}\" has no value"))
                .hint("use KEY=VALUE, as path=disk.img,readonly=on; write a comma twice"));
        };
        let Some(key) = KEYS.into_iter().find(|known| *known == key) else {
            return Err(ConfigError::new(OPTION, spec, format!("unknown key \"{key}\""))
                .hint(format!("known are {}", KEYS.join(", "))));
        };
        if seen.contains(&key) {
            return Err(ConfigError::new(OPTION, spec, format!("{key} is given twice")));
        }
        seen.push(key);
        match key {
            "path" => disk.path = value.into(),
            "readonly" => disk.readonly = switch("--disk readonly=", value)?,
            "queues" => disk.queues = parse_queues(value)?,
            "queue-size" => disk.queue_size = parse_queue_size(value)?,
            "engine" => disk.engine = choice("--disk engine=", value, &ENGINES)?,
            "direct" => disk.direct = switch("--disk direct=", value)?,
            "cache" => disk.cache = choice("--disk cache=", value, &CACHES)?,
            "discard" => disk.discard = switch("--disk discard=", value)?,
            "serial" => disk.serial = parse_serial(value)?,
            "event-idx" => disk.event_idx = switch("--disk event-idx=", value)?,
            "packed" => disk.packed = switch("--disk packed=", value)?,
            "block-size" => {
                disk.block_bytes = Some(choice("--disk block-size=", value, &BLOCK_SIZES_BYTES)?);
            }
            _ => disk.raw = choice("--disk format=", value, &[("raw", true)])?,
        }
    }
    if disk.path.as_os_str().is_empty() {
        return Err(ConfigError::new(OPTION, spec, "no path").hint("use path=PATH"));
    }
    Ok(disk)
}

fn parse_queues(text: &str) -> Result<u16, ConfigError> {
    let option = "--disk queues=";
    let queues = number(option, text)?;
    u16::try_from(queues).ok().filter(|queues| BlkConfig::QUEUES.contains(queues)).ok_or_else(
        || {
            let (least, most) = BlkConfig::QUEUES.into_inner();
            ConfigError::new(option, text, "not a possible number of queues")
                .hint(format!("use {least} to {most}"))
        },
    )
}

fn parse_queue_size(text: &str) -> Result<u16, ConfigError> {
    let option = "--disk queue-size=";
    let size = number(option, text)?;
    let possible = |size: &u16| size.is_power_of_two() && BlkConfig::QUEUE_SIZES.contains(size);
    u16::try_from(size).ok().filter(possible).ok_or_else(|| {
        let (least, most) = BlkConfig::QUEUE_SIZES.into_inner();
        ConfigError::new(option, text, "not a possible queue size")
            .hint(format!("use a power of two from {least} to {most}"))
    })
}

fn parse_serial(text: &str) -> Result<String, ConfigError> {
    let printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let most = BlkConfig::SERIAL_MAX_BYTES;
    if printable && text.len() <= most {
        return Ok(text.to_owned());
    }
    Err(ConfigError::new("--disk serial=", text, "not a serial number of a disk")
        .hint(format!("use at most {most} bytes of printable ASCII")))
}

/// A disk that cannot be opened is an option that is wrong.
impl From<DiskError> for ConfigError {
    fn from(error: DiskError) -> Self {
        let (path, problem) = match error {
            DiskError::Option { path, problem } => (path, problem),
            DiskError::Unusable { path, problem } => (path, problem.to_owned()),
            DiskError::Os { path, what, error } => (path, format!("{what}: {}", reason(&error))),
        };
        Self::new(OPTION, path.display(), problem)
    }
}

/// The disks as JSON, with the names of the command line.
pub(super) fn serialize<S: Serializer>(
    disks: &[BlkConfig],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    fn word<T: Copy + PartialEq>(words: &[(&'static str, T)], value: T) -> Option<&'static str> {
        words.iter().find(|(_, of)| *of == value).map(|(word, _)| *word)
    }
    let disk = |disk: &BlkConfig| {
        serde_json::json!({
            "name": disk.name,
            "path": disk.path.to_string_lossy(),
            "readonly": disk.readonly,
            "queues": disk.queues,
            "queue_size": disk.queue_size,
            "engine": word(&ENGINES, disk.engine),
            "direct": disk.direct,
            "cache": word(&CACHES, disk.cache),
            "discard": disk.discard,
            "serial": disk.serial,
            "event_idx": disk.event_idx,
            "packed": disk.packed,
            "block_size_bytes": disk.block_bytes,
        })
    };
    disks.iter().map(disk).collect::<Vec<_>>().serialize(serializer)
}

/// Refuses a file that two disks share, if one of them writes.
pub(super) fn check_shared(disks: &[BlkConfig]) -> Result<(), ConfigError> {
    let mut seen: BTreeMap<files::Identity, bool> = BTreeMap::new();
    for disk in disks {
        let Some(identity) = files::identity(&disk.path) else { continue };
        let writes = !disk.readonly;
        let written_before = seen.get(&identity).copied();
        if written_before.is_some_and(|written| written || writes) {
            return Err(ConfigError::new(
                OPTION,
                disk.path.display(),
                "is two disks at once, and the guest could write to it",
            )
            .hint("give each disk a file of its own, or make all that share one readonly=on"));
        }
        seen.insert(identity, writes);
    }
    Ok(())
}

/// Splits at single commas; two commas are one that belongs to the value.
fn split_items(spec: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut chars = spec.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(c);
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(spec: &str) -> Result<BlkConfig, String> {
        parse(spec).map_err(|error| error.to_string())
    }

    #[test]
    fn a_path_is_enough_and_the_rest_is_as_the_help_says() {
        let disk = parsed("path=disk.img").unwrap();
        assert_eq!(disk.path.to_str(), Some("disk.img"));
        assert!(!disk.readonly && !disk.direct && disk.discard && disk.event_idx);
        assert!(!disk.packed && !disk.raw);
        assert_eq!(disk.block_bytes, None);
        assert_eq!((disk.queues, disk.queue_size), (1, 256));
        assert_eq!((disk.engine, disk.cache), (EngineKind::Uring, CacheMode::Writeback));
        assert_eq!(disk.serial, "");
    }

    #[test]
    fn every_key_sets_what_it_names() {
        let disk = parsed(
            "readonly=on,queues=2,queue-size=128,engine=sync,direct=on,cache=writethrough,\
             discard=off,serial=D 1,event-idx=off,packed=on,block-size=4096,format=raw,path=a=b",
        )
        .unwrap();
        assert_eq!(disk.path.to_str(), Some("a=b"));
        assert!(disk.readonly && disk.direct && !disk.discard && !disk.event_idx);
        assert!(disk.packed && disk.raw);
        assert_eq!(disk.block_bytes, Some(4096));
        assert_eq!((disk.queues, disk.queue_size), (2, 128));
        assert_eq!((disk.engine, disk.cache), (EngineKind::Sync, CacheMode::Writethrough));
        assert_eq!(disk.serial, "D 1");
        assert_eq!(parsed("path=a,engine=null").unwrap().engine, EngineKind::Null);
    }

    #[test]
    fn the_ranges_here_are_those_of_the_device() {
        let most = "path=a,queues=64,queue-size=1024,serial=12345678901234567890";
        assert_eq!(parsed(most).unwrap().check(), Ok(()));
        assert_eq!(parsed("path=a,queue-size=4").unwrap().check(), Ok(()));
        for wrong in [
            BlkConfig { queues: 65, ..BlkConfig::default() },
            BlkConfig { queue_size: 2, ..BlkConfig::default() },
        ] {
            assert!(wrong.check().is_err());
        }
    }

    #[test]
    fn a_disk_that_cannot_be_opened_is_told_by_its_option() {
        let error = DiskError::Os {
            path: "a.img".into(),
            what: "cannot be opened",
            error: std::io::Error::from_raw_os_error(libc::EACCES),
        };
        let message = ConfigError::from(error).to_string();
        assert_eq!(message, "--disk a.img: cannot be opened: permission denied");
    }

    #[test]
    fn a_comma_of_a_path_is_written_twice() {
        for (spec, path) in [
            ("path=a,,b,readonly=on", "a,b"),
            ("path=,,,,x", ",,x"),
            ("readonly=on,path=a,,", "a,"),
        ] {
            assert_eq!(parsed(spec).unwrap().path.to_str(), Some(path), "{spec}");
        }
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_known_ones() {
        let message = parsed("path=a,read-only=on").unwrap_err();
        assert!(message.contains("unknown key \"read-only\""), "{message}");
        for key in KEYS {
            assert!(message.contains(key), "{key}: {message}");
        }
    }

    #[test]
    fn keys_have_values_and_come_once() {
        for spec in ["disk.img", "path=a,readonly", "path=a,", "path=a,,,b", ""] {
            assert!(parsed(spec).unwrap_err().contains("has no value"), "{spec}");
        }
        assert!(parsed("path=a,path=a").unwrap_err().contains("path is given twice"));
        assert!(parsed("readonly=on").unwrap_err().contains("no path"));
        assert!(parsed("path=").unwrap_err().contains("no path"));
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_range() {
        for (value, expected) in [
            ("queues=0", "1 to 64"),
            ("queues=65", "1 to 64"),
            ("queues=65537", "1 to 64"),
            ("queues=x", "not a number"),
            ("queue-size=0", "power of two from 4 to 1024"),
            ("queue-size=2", "power of two"),
            ("queue-size=100", "power of two"),
            ("queue-size=65536", "power of two"),
            ("engine=aio", "uring, sync or null"),
            ("cache=none", "writeback or writethrough"),
            ("readonly=1", "on or off"),
            ("direct=", "on or off"),
            ("discard=maybe", "on or off"),
            ("event-idx=ON", "on or off"),
            ("serial=123456789012345678901", "at most 20 bytes"),
            ("serial=\u{e9}", "ASCII"),
            ("serial=a\tb", "ASCII"),
        ] {
            let message = parsed(&format!("path=a,{value}")).unwrap_err();
            assert!(message.contains(expected), "{value}: {message}");
            assert!(message.starts_with("--disk ") && !message.contains('\t'), "{message}");
        }
    }

    #[test]
    fn a_file_may_be_two_disks_only_if_both_are_read_only() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&file, [0; 512]).unwrap();
        std::fs::hard_link(&file, &link).unwrap();
        let other = directory.path().join("c");
        std::fs::write(&other, [0; 512]).unwrap();
        let disk = |path: &std::path::Path, readonly: bool| BlkConfig {
            path: path.into(),
            readonly,
            ..BlkConfig::default()
        };
        assert!(check_shared(&[disk(&file, true), disk(&link, true)]).is_ok());
        assert!(check_shared(&[disk(&file, false), disk(&other, false)]).is_ok());
        for (a, b) in [(false, false), (false, true), (true, false)] {
            let error = check_shared(&[disk(&file, a), disk(&link, b)]).unwrap_err();
            assert!(error.to_string().contains("two disks at once"), "{error}");
        }
    }
}
