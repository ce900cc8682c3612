//! `--disk`: a virtio-blk disk and its keys.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::units::{choice, number, switch};
use super::{ConfigError, files};

const OPTION: &str = "--disk";

/// One virtio-blk disk, validated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskConfig {
    /// The file or block device behind it.
    #[serde(serialize_with = "super::path_as_text")]
    pub path: PathBuf,
    /// The guest may not write, and the file is opened read-only.
    pub readonly: bool,
    /// Number of request queues, each with a worker thread.
    pub queues: u16,
    /// Descriptors in each queue: a power of two.
    pub queue_size: u16,
    /// What carries requests out.
    pub engine: Engine,
    /// Open with `O_DIRECT`: past the host's page cache.
    pub direct: bool,
    /// Whether a write has to reach stable storage before it completes.
    pub cache: Cache,
    /// Offer discard and write-zeroes.
    pub discard: bool,
    /// Offer `VIRTIO_F_EVENT_IDX`.
    pub event_idx: bool,
    /// What the guest reads with `VIRTIO_BLK_T_GET_ID`: at most 20 bytes of printable ASCII.
    pub serial: Option<String>,
}

/// What carries a disk's requests out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// io_uring, one ring a queue.
    Uring,
    /// One system call after the other, in the worker.
    Sync,
    /// Nothing: requests complete at once and move no data.
    Null,
}

/// A disk's write cache, as the guest first sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Data is on stable storage after a flush.
    Writeback,
    /// Data is on stable storage when its write completes.
    Writethrough,
}

impl DiskConfig {
    /// The fewest descriptors of a queue: header, status and two data segments.
    pub const QUEUE_SIZE_MIN: u16 = 4;
    /// The most descriptors of a queue (virtio 1.2, 2.7).
    pub const QUEUE_SIZE_MAX: u16 = 32768;
    /// The most queues of a disk.
    pub const QUEUES_MAX: u16 = 64;

    const KEYS: [&str; 10] = [
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
    ];

    /// Parses one `--disk` value. Looks at no file; that is [`check_file`](Self::check_file).
    pub(super) fn parse(spec: &str) -> Result<Self, ConfigError> {
        let mut values = BTreeMap::new();
        for item in split_items(spec) {
            let Some((key, value)) = item.split_once('=') else {
                return Err(ConfigError::new(OPTION, spec, format!("\"{item}\" has no value"))
                    .hint("use KEY=VALUE, as path=disk.img,readonly=on; write a comma twice"));
            };
            if !Self::KEYS.contains(&key) {
                return Err(ConfigError::new(OPTION, spec, format!("unknown key \"{key}\""))
                    .hint(format!("known are {}", Self::KEYS.join(", "))));
            }
            if values.insert(key.to_owned(), value.to_owned()).is_some() {
                return Err(ConfigError::new(OPTION, spec, format!("{key} is given twice")));
            }
        }
        let value = |key: &str, default: &str| {
            values.get(key).cloned().unwrap_or_else(|| default.to_owned())
        };
        let path = value("path", "");
        if path.is_empty() {
            return Err(ConfigError::new(OPTION, spec, "no path").hint("use path=PATH"));
        }
        Ok(Self {
            path: path.into(),
            readonly: switch("--disk readonly=", &value("readonly", "off"))?,
            queues: Self::parse_queues(&value("queues", "1"))?,
            queue_size: Self::parse_queue_size(&value("queue-size", "256"))?,
            engine: choice(
                "--disk engine=",
                &value("engine", "uring"),
                &[("uring", Engine::Uring), ("sync", Engine::Sync), ("null", Engine::Null)],
            )?,
            direct: switch("--disk direct=", &value("direct", "off"))?,
            cache: choice(
                "--disk cache=",
                &value("cache", "writeback"),
                &[("writeback", Cache::Writeback), ("writethrough", Cache::Writethrough)],
            )?,
            discard: switch("--disk discard=", &value("discard", "on"))?,
            event_idx: switch("--disk event-idx=", &value("event-idx", "on"))?,
            serial: values.get("serial").map(|serial| Self::parse_serial(serial)).transpose()?,
        })
    }

    fn parse_queues(text: &str) -> Result<u16, ConfigError> {
        let option = "--disk queues=";
        let queues = number(option, text)?;
        u16::try_from(queues)
            .ok()
            .filter(|queues| (1..=Self::QUEUES_MAX).contains(queues))
            .ok_or_else(|| {
                ConfigError::new(option, text, "not a possible number of queues")
                    .hint(format!("use 1 to {}", Self::QUEUES_MAX))
            })
    }

    fn parse_queue_size(text: &str) -> Result<u16, ConfigError> {
        let option = "--disk queue-size=";
        let size = number(option, text)?;
        u16::try_from(size)
            .ok()
            .filter(|size| size.is_power_of_two())
            .filter(|size| (Self::QUEUE_SIZE_MIN..=Self::QUEUE_SIZE_MAX).contains(size))
            .ok_or_else(|| {
                ConfigError::new(option, text, "not a possible queue size").hint(format!(
                    "use a power of two from {} to {}",
                    Self::QUEUE_SIZE_MIN,
                    Self::QUEUE_SIZE_MAX
                ))
            })
    }

    fn parse_serial(text: &str) -> Result<String, ConfigError> {
        let good = text.len() <= 20 && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if good {
            Ok(text.to_owned())
        } else {
            Err(ConfigError::new("--disk serial=", text, "not a serial number of a disk")
                .hint("use at most 20 bytes of printable ASCII"))
        }
    }

    /// Checks that the file is there, can be a disk, and can be opened as it must be.
    pub(super) fn check_file(&self) -> Result<(), ConfigError> {
        files::check_disk(OPTION, &self.path, !self.readonly)
    }
}

/// Refuses a file that two disks share, if one of them writes.
pub(super) fn check_shared(disks: &[DiskConfig]) -> Result<(), ConfigError> {
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

    fn parse(spec: &str) -> Result<DiskConfig, String> {
        DiskConfig::parse(spec).map_err(|error| error.to_string())
    }

    #[test]
    fn a_path_is_enough() {
        assert_eq!(
            parse("path=disk.img").unwrap(),
            DiskConfig {
                path: "disk.img".into(),
                readonly: false,
                queues: 1,
                queue_size: 256,
                engine: Engine::Uring,
                direct: false,
                cache: Cache::Writeback,
                discard: true,
                event_idx: true,
                serial: None,
            }
        );
    }

    #[test]
    fn every_key_sets_what_it_names() {
        let spec = "readonly=on,queues=2,queue-size=128,engine=sync,direct=on,cache=writethrough,\
                    discard=off,serial=D 1,event-idx=off,path=a=b";
        assert_eq!(
            parse(spec).unwrap(),
            DiskConfig {
                path: "a=b".into(),
                readonly: true,
                queues: 2,
                queue_size: 128,
                engine: Engine::Sync,
                direct: true,
                cache: Cache::Writethrough,
                discard: false,
                event_idx: false,
                serial: Some("D 1".to_owned()),
            }
        );
        assert_eq!(parse("path=a,engine=null").unwrap().engine, Engine::Null);
    }

    #[test]
    fn a_comma_of_a_path_is_written_twice() {
        for (spec, path) in [
            ("path=a,,b,readonly=on", "a,b"),
            ("path=,,,,x", ",,x"),
            ("readonly=on,path=a,,", "a,"),
        ] {
            assert_eq!(parse(spec).unwrap().path.to_str(), Some(path), "{spec}");
        }
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_known_ones() {
        let message = parse("path=a,read-only=on").unwrap_err();
        assert!(message.contains("unknown key \"read-only\""), "{message}");
        for key in DiskConfig::KEYS {
            assert!(message.contains(key), "{key}: {message}");
        }
    }

    #[test]
    fn keys_have_values_and_come_once() {
        for spec in ["disk.img", "path=a,readonly", "path=a,", "path=a,,,b", ""] {
            assert!(parse(spec).unwrap_err().contains("has no value"), "{spec}");
        }
        assert!(parse("path=a,path=a").unwrap_err().contains("path is given twice"));
        assert!(parse("readonly=on").unwrap_err().contains("no path"));
        assert!(parse("path=").unwrap_err().contains("no path"));
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_range() {
        for (value, expected) in [
            ("queues=0", "1 to 64"),
            ("queues=65", "1 to 64"),
            ("queues=65537", "1 to 64"),
            ("queues=x", "not a number"),
            ("queue-size=0", "power of two from 4 to 32768"),
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
            let message = parse(&format!("path=a,{value}")).unwrap_err();
            assert!(message.contains(expected), "{value}: {message}");
            assert!(message.starts_with("--disk ") && !message.contains('\t'), "{message}");
        }
        assert_eq!(parse("path=a,queues=64,queue-size=32768").unwrap().queue_size, 32768);
        assert_eq!(parse("path=a,queue-size=4,serial=12345678901234567890").unwrap().queue_size, 4);
    }

    #[test]
    fn a_file_may_be_two_disks_only_if_both_are_read_only() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&file, [0; 512]).unwrap();
        std::fs::hard_link(&file, &link).unwrap();
        let other = directory.path().join("c");
        std::fs::write(&other, [0; 512]).unwrap();
        let disk = |path: &std::path::Path, readonly: bool| DiskConfig {
            path: path.into(),
            readonly,
            ..DiskConfig::parse("path=x").unwrap()
        };
        assert!(check_shared(&[disk(&file, true), disk(&link, true)]).is_ok());
        assert!(check_shared(&[disk(&file, false), disk(&other, false)]).is_ok());
        for (a, b) in [(false, false), (false, true), (true, false)] {
            let error = check_shared(&[disk(&file, a), disk(&link, b)]).unwrap_err();
            assert!(error.to_string().contains("two disks at once"), "{error}");
        }
    }
}
