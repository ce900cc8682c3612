//! What a block device is made of, which features it offers, and its configuration space
//! (virtio 1.2, 5.2.3 and 5.2.4).

use std::ops::RangeInclusive;
use std::path::PathBuf;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::virtio_config::{
    VIRTIO_F_RING_PACKED, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::disk::Disk;

/// The unit of every sector number of the protocol, whatever the disk's block size (5.2.4).
pub const SECTOR_BYTES: u64 = 512;
/// The length of a device ID string, which is also what GET_ID writes (5.2.6).
pub const ID_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;
/// The most segments of one discard or write-zeroes request.
pub const MAX_RANGE_SEGMENTS: u32 = 16;
/// The most sectors of one such segment: 2 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// The length of `struct virtio_blk_config` in bytes (5.2.4).
pub const CONFIG_BYTES: usize = 72;

/// Offset of `writeback` in the configuration space, its only writable field.
const WRITEBACK_OFFSET: u64 = 32;
/// Who carries out the requests of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// What the page cache has is copied at once; the rest goes through io_uring.
    #[default]
    Uring,
    /// Each request by a blocking system call of the queue's worker.
    Sync,
    /// Completes at once and moves no data: the cost of the path itself.
    Null,
}

/// When a write is on stable storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// When a flush that followed it has completed.
    #[default]
    Writeback,
    /// When it has completed.
    Writethrough,
}

/// A block device as the user asked for it.
#[derive(Clone, Debug)]
pub struct BlkConfig {
    /// The name in messages and thread names: `blk0`.
    pub name: String,
    /// The backing file or block device.
    pub path: PathBuf,
    /// The guest cannot write, whatever features it accepts.
    pub readonly: bool,
    /// The number of queues, 1 to 64, each with a worker thread of its own.
    pub queues: u16,
    /// The largest size of each queue: a power of two, 4 to 1024.
    pub queue_size: u16,
    /// Who carries out the requests.
    pub engine: EngineKind,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// The cache mode the device starts with; a driver that negotiates CONFIG_WCE may change it.
    pub cache: CacheMode,
    /// Offer discard and write-zeroes.
    pub discard: bool,
    /// The serial number, at most 20 bytes.
    pub serial: String,
    /// Offer `VIRTIO_F_EVENT_IDX`.
    pub event_idx: bool,
    /// Offer `VIRTIO_F_RING_PACKED`.
    pub packed: bool,
    /// The logical block size in bytes, 512 or 4096; `None`: 512 for a file, a block device's own.
    pub block_bytes: Option<u32>,
    /// Take the file for a raw image even if it looks like one of another format.
    pub raw: bool,
    /// The longest time in nanoseconds a worker polls before it sleeps; 0: it never polls.
    pub io_poll_ns: u32,
    /// The host CPU each queue's worker is bound to; queues past the end are not bound.
    pub pin_cpus: Vec<Option<usize>>,
}

impl Default for BlkConfig {
    fn default() -> BlkConfig {
        BlkConfig {
            name: "blk0".into(),
            path: PathBuf::new(),
            readonly: false,
            queues: 1,
            queue_size: 256,
            engine: EngineKind::default(),
            direct: false,
            cache: CacheMode::default(),
            discard: true,
            serial: String::new(),
            event_idx: true,
            packed: false,
            block_bytes: None,
            raw: false,
            io_poll_ns: 0,
            pin_cpus: Vec::new(),
        }
    }
}

impl BlkConfig {
    /// Possible queue sizes, of which powers of two are taken. The fewest descriptors hold a header,
    /// data and a status byte. A virtqueue may have 32768 (virtio 1.2, 2.7, 2.8), but a guest can
    /// make the device keep 16 bytes for each buffer of each chain, which is the square of this.
    pub const QUEUE_SIZES: RangeInclusive<u16> = 4..=1024;
    /// Possible numbers of queues.
    pub const QUEUES: RangeInclusive<u16> = 1..=64;
    /// Possible logical block sizes, in bytes: those that Linux and its file systems know.
    pub const BLOCK_SIZES_BYTES: [u32; 2] = [512, 4096];
    /// The most bytes of a serial number.
    pub const SERIAL_MAX_BYTES: usize = ID_BYTES;

    /// Says what is wrong with the numbers, in one line that names what would be right.
    ///
    /// # Errors
    /// The line.
    pub fn check(&self) -> Result<(), String> {
        if !Self::QUEUES.contains(&self.queues) {
            let (least, most) = Self::QUEUES.into_inner();
            return Err(format!("queues={} must be {least} to {most}", self.queues));
        }
        let size = self.queue_size;
        if !size.is_power_of_two() || !Self::QUEUE_SIZES.contains(&size) {
            let (least, most) = Self::QUEUE_SIZES.into_inner();
            return Err(format!("queue-size={size} must be a power of two, {least} to {most}"));
        }
        if self.block_bytes.is_some_and(|bytes| !Self::BLOCK_SIZES_BYTES.contains(&bytes)) {
            let [least, most] = Self::BLOCK_SIZES_BYTES;
            return Err(format!("block-size must be {least} or {most}"));
        }
        if self.serial.len() > Self::SERIAL_MAX_BYTES {
            let most = Self::SERIAL_MAX_BYTES;
            return Err(format!("serial={} must be at most {most} bytes", self.serial));
        }
        Ok(())
    }

    /// The serial number as GET_ID hands it out, padded with zeros (5.2.6).
    pub(crate) fn id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(self.serial.bytes()) {
            *to = from;
        }
        id
    }
}

/// The mask of one feature bit.
pub(crate) const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// Whether writes may be cached for this driver: not for one that chooses the cache mode but cannot
/// flush (5.2.5.2).
pub(crate) fn may_cache(features: u64) -> bool {
    features & bit(VIRTIO_BLK_F_CONFIG_WCE) == 0 || features & bit(VIRTIO_BLK_F_FLUSH) != 0
}

/// All features of a device with this configuration and disk (5.2.3, 6).
pub(crate) fn features(config: &BlkConfig, disk: &Disk) -> u64 {
    let mut features = bit(VIRTIO_F_VERSION_1)
        | bit(VIRTIO_F_RING_RESET)
        | bit(VIRTIO_RING_F_INDIRECT_DESC)
        | bit(VIRTIO_BLK_F_SEG_MAX)
        | bit(VIRTIO_BLK_F_BLK_SIZE)
        | bit(VIRTIO_BLK_F_TOPOLOGY)
        | bit(VIRTIO_BLK_F_FLUSH)
        | bit(VIRTIO_BLK_F_CONFIG_WCE)
        | bit(VIRTIO_BLK_F_MQ);
    if config.event_idx {
        features |= bit(VIRTIO_RING_F_EVENT_IDX);
    }
    if config.packed {
        features |= bit(VIRTIO_F_RING_PACKED);
    }
    if config.readonly {
        features |= bit(VIRTIO_BLK_F_RO);
    } else if config.discard {
        features |= bit(VIRTIO_BLK_F_WRITE_ZEROES);
        if disk.can_discard() {
            features |= bit(VIRTIO_BLK_F_DISCARD);
        }
    }
    features
}

/// The fixed part of the configuration space.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSpace {
    seg_max: u32,
    num_queues: u16,
    block_size_bytes: u32,
    physical_block_bytes: u32,
    discard: bool,
    write_zeroes: bool,
}

impl ConfigSpace {
    pub(crate) fn new(config: &BlkConfig, disk: &Disk) -> ConfigSpace {
        let features = features(config, disk);
        ConfigSpace {
            // The header and the status byte take a descriptor each (case: a longer chain would
            // never fit).
            seg_max: u32::from(config.queue_size.saturating_sub(2)),
            num_queues: config.queues,
            block_size_bytes: disk.block_bytes(),
            physical_block_bytes: disk.physical_block_bytes(),
            discard: features & bit(VIRTIO_BLK_F_DISCARD) != 0,
            write_zeroes: features & bit(VIRTIO_BLK_F_WRITE_ZEROES) != 0,
        }
    }

    /// `struct virtio_blk_config` (5.2.4), little-endian.
    pub(crate) fn to_bytes(&self, capacity_sectors: u64, writeback: bool) -> [u8; CONFIG_BYTES] {
        let physical_blocks = (self.physical_block_bytes / self.block_size_bytes.max(1)).max(1);
        let physical_block_exp = physical_blocks.ilog2() as u8;
        let min_io_blocks = u16::try_from(physical_blocks).unwrap_or(u16::MAX);
        let physical_sectors = self.physical_block_bytes / SECTOR_BYTES as u32;
        let range = |on: bool, value: u32| if on { value } else { 0 };

        let mut out = Layout { bytes: [0; CONFIG_BYTES], at: 0 };
        out.put(&capacity_sectors.to_le_bytes());
        out.put(&0u32.to_le_bytes()); // size_max: not offered
        out.put(&self.seg_max.to_le_bytes());
        out.put(&[0; 4]); // geometry: not offered
        out.put(&self.block_size_bytes.to_le_bytes());
        out.put(&[physical_block_exp, 0]); // topology: exponent, alignment offset
        out.put(&min_io_blocks.to_le_bytes());
        out.put(&0u32.to_le_bytes()); // opt_io_size: no hint
        out.put(&[u8::from(writeback), 0]);
        out.put(&self.num_queues.to_le_bytes());
        out.put(&range(self.discard, MAX_RANGE_SECTORS).to_le_bytes());
        out.put(&range(self.discard, MAX_RANGE_SEGMENTS).to_le_bytes());
        out.put(&range(self.discard, physical_sectors).to_le_bytes());
        out.put(&range(self.write_zeroes, MAX_RANGE_SECTORS).to_le_bytes());
        out.put(&range(self.write_zeroes, MAX_RANGE_SEGMENTS).to_le_bytes());
        // write_zeroes_may_unmap, then padding; the secure-erase fields stay zero: not offered.
        out.put(&[u8::from(self.write_zeroes && self.discard), 0, 0, 0]);
        out.bytes
    }

    /// What a write of `data` at `offset` makes of `writeback`: `None` if it does not touch the
    /// field, or if the driver may not (5.2.5).
    pub(crate) fn writeback_written(features: u64, offset: u64, data: &[u8]) -> Option<bool> {
        if features & bit(VIRTIO_BLK_F_CONFIG_WCE) == 0 {
            return None;
        }
        let index = usize::try_from(WRITEBACK_OFFSET.checked_sub(offset)?).ok()?;
        data.get(index).map(|value| *value & 1 != 0)
    }
}

/// Writes fields one after another.
struct Layout {
    bytes: [u8; CONFIG_BYTES],
    at: usize,
}

impl Layout {
    fn put(&mut self, field: &[u8]) {
        for (to, from) in self.bytes.iter_mut().skip(self.at).zip(field) {
            *to = *from;
        }
        self.at += field.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace {
            seg_max: 254,
            num_queues: 3,
            block_size_bytes: 512,
            physical_block_bytes: 4096,
            discard: true,
            write_zeroes: true,
        }
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let bytes = space().to_bytes(0x0123_4567_89ab_cdef, true);
        assert_eq!(bytes[..8], 0x0123_4567_89ab_cdefu64.to_le_bytes());
        assert_eq!(u32_at(&bytes, 8), 0, "size_max");
        assert_eq!(u32_at(&bytes, 12), 254, "seg_max");
        assert_eq!(u32_at(&bytes, 20), 512, "blk_size");
        assert_eq!(bytes[24..28], [3, 0, 8, 0], "topology");
        assert_eq!(bytes[32..34], [1, 0], "writeback, unused0");
        assert_eq!(bytes[34..36], [3, 0], "num_queues");
        assert_eq!(u32_at(&bytes, 36), MAX_RANGE_SECTORS);
        assert_eq!(u32_at(&bytes, 40), MAX_RANGE_SEGMENTS);
        assert_eq!(u32_at(&bytes, 44), 8, "discard_sector_alignment");
        assert_eq!(u32_at(&bytes, 48), MAX_RANGE_SECTORS);
        assert_eq!(u32_at(&bytes, 52), MAX_RANGE_SEGMENTS);
        assert_eq!(bytes[56], 1, "write_zeroes_may_unmap");
        assert_eq!(bytes[57..72], [0; 15], "unused1; nothing of secure erase");
    }

    #[test]
    fn write_zeroes_may_unmap_only_where_space_can_be_given_up() {
        let bytes = ConfigSpace { discard: false, ..space() }.to_bytes(1, true);
        assert_eq!(bytes[36..48], [0; 12], "no discard");
        assert_eq!(u32_at(&bytes, 52), MAX_RANGE_SEGMENTS);
        assert_eq!(bytes[56], 0, "write_zeroes_may_unmap");
    }

    #[test]
    fn only_writeback_is_writable_and_only_with_config_wce() {
        let wce = bit(VIRTIO_BLK_F_CONFIG_WCE);
        assert_eq!(ConfigSpace::writeback_written(wce, 32, &[0]), Some(false));
        assert_eq!(ConfigSpace::writeback_written(wce, 32, &[1]), Some(true));
        assert_eq!(ConfigSpace::writeback_written(0, 32, &[0]), None);
        assert_eq!(ConfigSpace::writeback_written(wce, 33, &[0]), None);
        assert_eq!(ConfigSpace::writeback_written(wce, 31, &[0]), None);
        assert_eq!(ConfigSpace::writeback_written(wce, u64::MAX, &[0]), None);
    }

    #[test]
    fn wrong_numbers_are_told_with_what_would_be_right() {
        let good = BlkConfig::default();
        assert_eq!(good.check(), Ok(()));
        let told = |config: BlkConfig, words: &str| {
            let error = config.check().unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        told(BlkConfig { queues: 0, ..good.clone() }, "queues=0 must be 1 to 64");
        told(BlkConfig { queues: 65, ..good.clone() }, "queues=65");
        told(BlkConfig { queue_size: 2, ..good.clone() }, "queue-size=2");
        told(BlkConfig { queue_size: 100, ..good.clone() }, "power of two");
        told(BlkConfig { serial: "x".repeat(21), ..good }, "at most 20 bytes");
    }
}
