//! From a descriptor chain to a block request (virtio 1.2, 5.2.6).
//!
//! The driver may frame a request as it likes (2.7.4): the header, the data and the status byte are
//! runs of bytes, and descriptors may end anywhere in them. So nothing here looks at descriptors:
//! the first 16 readable bytes are the header, the last writable byte is the status, and what is
//! left is data.

use devices::virtio::queue::{Chain, GuestByte};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use crate::config::{ID_BYTES, MAX_RANGE_SECTORS, MAX_RANGE_SEGMENTS, SECTOR_BYTES, bit};

/// Bytes of the header: type, reserved, sector.
const HEADER_BYTES: usize = 16;
/// Bytes of a discard or write-zeroes segment: sector, number of sectors, flags.
const SEGMENT_BYTES: usize = 16;

/// How a request ended, as its status byte says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// Done.
    Ok = VIRTIO_BLK_S_OK as u8,
    /// It failed, or asked for what is against the rules.
    IoError = VIRTIO_BLK_S_IOERR as u8,
    /// The device, or the file behind it, cannot do this at all.
    Unsupported = VIRTIO_BLK_S_UNSUPP as u8,
}

/// A run of bytes of the disk, inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
}

/// What an engine is asked to do. A transfer's buffers are what is left of the chain.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// From the disk into the chain's writable buffers.
    Read(Range),
    /// From the chain's readable buffers to the disk; `durable`: on stable storage when complete.
    Write { range: Range, durable: bool },
    /// Everything that completed before is on stable storage when complete.
    Flush,
    /// The ranges' contents do not matter any more.
    Discard { ranges: Vec<Range>, durable: bool },
    /// The ranges read as zero from now on; those with `true` may give up their space.
    WriteZeroes { ranges: Vec<(Range, bool)>, durable: bool },
}

/// A request on its way. It owns its chain, and so the buffers an engine works on.
pub(crate) struct Request {
    pub(crate) chain: Chain,
    pub(crate) status: GuestByte,
    pub(crate) action: Action,
}

/// What became of a chain.
pub(crate) enum Parsed {
    /// Something for an engine.
    Start(Request),
    /// It has an answer already, after writing and consuming `written_bytes` bytes of data.
    Answer { chain: Chain, status: GuestByte, answer: Status, written_bytes: u32 },
    /// No writable byte, so nowhere to put a status. The rules forbid the driver this (5.2.6.1) and
    /// name no consequence; the chain goes back with a used length of 0, which says that nothing
    /// was written (2.7.8.2), and nothing is done.
    NoStatus(Chain),
}

/// What the device and its driver agreed on, as far as requests go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) capacity_sectors: u64,
    pub(crate) readonly: bool,
    /// The negotiated features.
    pub(crate) features: u64,
    /// The cache mode now.
    pub(crate) writeback: bool,
    pub(crate) id: [u8; ID_BYTES],
}

impl Limits {
    /// Whether a write must be on stable storage when it completes: in write-through mode, and for
    /// a driver that cannot flush (5.2.6.2).
    fn durable(&self) -> bool {
        !self.writeback || self.features & bit(VIRTIO_BLK_F_FLUSH) == 0
    }

    /// The range of `length_bytes` from `sector`, if it is whole sectors inside the disk.
    fn range(&self, sector: u64, length_bytes: u64) -> Result<Range, Status> {
        if !length_bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(Status::IoError);
        }
        let end = sector.checked_add(length_bytes / SECTOR_BYTES).ok_or(Status::IoError)?;
        if end > self.capacity_sectors {
            return Err(Status::IoError);
        }
        let offset_bytes = sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoError)?;
        Ok(Range { offset_bytes, length_bytes })
    }

    fn writable(&self) -> Result<(), Status> {
        if self.readonly { Err(Status::IoError) } else { Ok(()) }
    }

    fn negotiated(&self, feature: u32) -> Result<(), Status> {
        if self.features & bit(feature) == 0 { Err(Status::Unsupported) } else { Ok(()) }
    }
}

impl Request {
    /// Takes a chain apart.
    pub(crate) fn parse(mut chain: Chain, limits: &Limits) -> Parsed {
        let Some(status) = chain.take_last_writable_byte() else {
            return Parsed::NoStatus(chain);
        };
        match Self::action(&mut chain, limits) {
            Ok(Some(action)) => Parsed::Start(Request { chain, status, action }),
            Ok(None) => {
                Parsed::Answer { chain, status, answer: Status::Ok, written_bytes: ID_BYTES as u32 }
            }
            Err(answer) => Parsed::Answer { chain, status, answer, written_bytes: 0 },
        }
    }

    /// What is to be done; `None`: the ID was written.
    fn action(chain: &mut Chain, limits: &Limits) -> Result<Option<Action>, Status> {
        let mut header = [0; HEADER_BYTES];
        if !chain.read(&mut header) {
            return Err(Status::IoError);
        }
        let mut fields = Fields(&header);
        let (kind, _reserved, sector) = (fields.u32(), fields.u32(), fields.u64());
        let action = match kind {
            VIRTIO_BLK_T_IN => Action::Read(limits.range(sector, chain.writable_bytes())?),
            VIRTIO_BLK_T_OUT => {
                limits.writable()?;
                let range = limits.range(sector, chain.readable_bytes())?;
                Action::Write { range, durable: limits.durable() }
            }
            VIRTIO_BLK_T_FLUSH => Action::Flush,
            VIRTIO_BLK_T_GET_ID => {
                if !chain.write(&limits.id) {
                    return Err(Status::IoError);
                }
                return Ok(None);
            }
            VIRTIO_BLK_T_DISCARD => {
                limits.negotiated(VIRTIO_BLK_F_DISCARD)?;
                let ranges = Self::ranges(chain, limits, 0)?;
                let ranges = ranges.into_iter().map(|(range, _)| range).collect();
                Action::Discard { ranges, durable: limits.durable() }
            }
            VIRTIO_BLK_T_WRITE_ZEROES => {
                limits.negotiated(VIRTIO_BLK_F_WRITE_ZEROES)?;
                let ranges = Self::ranges(chain, limits, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)?;
                Action::WriteZeroes { ranges, durable: limits.durable() }
            }
            _ => return Err(Status::Unsupported),
        };
        Ok(Some(action))
    }

    /// The segments of a discard or write-zeroes request, all of them checked before any is
    /// carried out, each with its unmap flag. Of the flags only `known` are allowed: another one is
    /// unsupported, whatever else is wrong (5.2.6.2). Of a request with more segments than there may
    /// be, which a driver must not send (5.2.6.1), only so many are looked at, or one request could
    /// keep the worker for as long as it takes to read all of RAM again and again.
    fn ranges(
        chain: &mut Chain,
        limits: &Limits,
        known: u32,
    ) -> Result<Vec<(Range, bool)>, Status> {
        let bytes = chain.readable_bytes();
        let count = bytes / SEGMENT_BYTES as u64;
        let looked_at = count.min(MAX_RANGE_SEGMENTS.into());
        let mut worst = limits.writable().err();
        if !bytes.is_multiple_of(SEGMENT_BYTES as u64) || count == 0 || count > looked_at {
            worst = Some(Status::IoError);
        }
        let mut ranges = Vec::with_capacity(looked_at as usize);
        let mut segment = [0; SEGMENT_BYTES];
        for _ in 0..looked_at {
            if !chain.read(&mut segment) {
                break;
            }
            let mut fields = Fields(&segment);
            let (sector, sectors, flags) = (fields.u64(), fields.u32(), fields.u32());
            if flags & !known != 0 {
                return Err(Status::Unsupported);
            }
            if sectors > MAX_RANGE_SECTORS {
                worst = Some(Status::IoError);
                continue;
            }
            match limits.range(sector, u64::from(sectors) * SECTOR_BYTES) {
                Ok(range) if range.length_bytes > 0 => {
                    ranges.push((range, flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0));
                }
                Ok(_empty) => {}
                Err(status) => worst = Some(status),
            }
        }
        worst.map_or(Ok(ranges), Err)
    }
}

/// Little-endian fields from the front; zero past the end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk::<N>() else {
            return [0; N];
        };
        self.0 = rest;
        *field
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use devices::GuestMemory;
    use devices::testkit::{self, Arena, Buf, Driver};

    use super::*;

    /// A chain that asks for this, as the queue gives it; `memory` must outlive it.
    pub(crate) fn chain(memory: &GuestMemory, kind: u32, data: &[u8], data_in: u32) -> Chain {
        let mut driver = Driver::new(memory, 0, 16, 0);
        let mut arena = Arena::new(memory, driver.end());
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend(data);
        let (out, into) = (arena.alloc_with(&bytes), arena.alloc(u64::from(data_in) + 1));
        driver.add(&[Buf::readable(out, bytes.len() as u32), Buf::writable(into, data_in + 1)]);
        driver.publish();
        let mut chain = Chain::new();
        assert!(driver.device_queue().pop(&mut chain).unwrap());
        chain
    }

    pub(crate) fn limits() -> Limits {
        Limits {
            capacity_sectors: 1024,
            readonly: false,
            features: u64::MAX,
            writeback: true,
            id: [0; ID_BYTES],
        }
    }

    pub(crate) fn request(chain: Chain, limits: &Limits) -> Request {
        match Request::parse(chain, limits) {
            Parsed::Start(request) => request,
            _ => panic!("no request for an engine"),
        }
    }

    #[test]
    fn writes_are_durable_in_write_through_mode_and_for_a_driver_that_cannot_flush() {
        let memory = testkit::memory(1 << 20);
        let write_back = limits();
        let write_through = Limits { writeback: false, ..limits() };
        let cannot_flush = Limits { features: !bit(VIRTIO_BLK_F_FLUSH), ..limits() };
        for (limits, expected) in [(write_back, false), (write_through, true), (cannot_flush, true)]
        {
            let write = request(chain(&memory, VIRTIO_BLK_T_OUT, &[1; 512], 0), &limits);
            let range = Range { offset_bytes: 0, length_bytes: 512 };
            assert_eq!(write.action, Action::Write { range, durable: expected });
            let mut segment = [0; SEGMENT_BYTES];
            segment[8] = 1;
            let discard = request(chain(&memory, VIRTIO_BLK_T_DISCARD, &segment, 0), &limits);
            assert_eq!(discard.action, Action::Discard { ranges: vec![range], durable: expected });
        }
    }

    #[test]
    fn ranges_end_at_the_capacity_and_sums_do_not_overflow() {
        let limits = limits();
        assert!(limits.range(1023, 512).is_ok());
        assert!(limits.range(1024, 0).is_ok());
        for (sector, bytes) in
            [(1023, 1024), (1024, 512), (u64::MAX, 512), (u64::MAX, u64::MAX - 511), (0, 513)]
        {
            assert_eq!(limits.range(sector, bytes), Err(Status::IoError), "{sector} {bytes}");
        }
        let all = Limits { capacity_sectors: u64::MAX, ..limits };
        assert_eq!(all.range(u64::MAX - 1, 512), Err(Status::IoError));
    }
}
