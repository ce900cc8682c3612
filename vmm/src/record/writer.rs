//! The thread that writes a recording.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::sync::{Arc, OnceLock};

use halt_poll::recording::{BLOCK_BYTES, HALT_BYTES, Header, block_header};

use super::LIMIT_BYTES;
use crate::config::reason;

/// Halts of one vCPU.
pub struct Halts {
    pub(super) vcpu: u32,
    /// How many were lost before them.
    pub(super) lost: u64,
    /// Room for a block's header, then the halts.
    pub(super) buffer: Vec<u8>,
    /// Where the buffer goes when it is written.
    pub(super) back: Sender<Vec<u8>>,
}

/// What the thread is asked to do.
pub enum Message {
    /// Write these.
    Halts(Halts),
    /// These are the vCPUs' threads from now on, in mode `kernel`; 0 until they run.
    Vcpus(Vec<Arc<AtomicI32>>),
    /// Write all that came before, and say so.
    Flush(SyncSender<()>),
}

/// What others see of it. Written by its thread alone.
#[derive(Debug, Default)]
pub struct Shared {
    halts: AtomicU64,
    lost: AtomicU64,
    bytes: AtomicU64,
    /// The largest window there is now. Written by who changes it.
    max_ns: AtomicU32,
    stopped: OnceLock<String>,
}

impl Shared {
    /// Halts written, halts lost, bytes written.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let [halts, lost, bytes] =
            [&self.halts, &self.lost, &self.bytes].map(|count| count.load(Ordering::Relaxed));
        (halts, lost, bytes)
    }

    pub(super) fn set_max_ns(&self, max_ns: u32) {
        self.max_ns.store(max_ns, Ordering::Relaxed);
    }

    /// Why no more is written.
    pub(super) fn stopped(&self) -> Option<String> {
        self.stopped.get().cloned()
    }
}

/// The file, and what became of it.
pub struct Writer<W = File> {
    output: W,
    shared: Arc<Shared>,
    limit_bytes: u64,
    /// Lost, which the file does not tell yet.
    untold: u64,
    /// What was written last may not be whole.
    failed: bool,
}

impl Writer<File> {
    /// Begins a recording in `file`, in place of what is there.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn begin(file: File, header: &Header) -> io::Result<Self> {
        // What has no length, as a pipe, holds nothing old.
        let _ = file.set_len(0);
        Self::new(file, LIMIT_BYTES, header)
    }
}

impl<W: Write> Writer<W> {
    fn new(mut output: W, limit_bytes: u64, header: &Header) -> io::Result<Self> {
        let header = header.to_bytes();
        output.write_all(&header)?;
        let shared = Arc::<Shared>::default();
        shared.bytes.store(header.len() as u64, Ordering::Relaxed);
        Ok(Self { output, shared, limit_bytes, untold: 0, failed: false })
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// The largest window there is now, in nanoseconds.
    pub(super) fn max_ns(&self) -> u32 {
        self.shared.max_ns.load(Ordering::Relaxed)
    }

    /// Does what it is asked to, until nobody can ask any more.
    pub(super) fn run(&mut self, messages: &Receiver<Message>) {
        for message in messages {
            self.serve(message);
        }
    }

    pub(super) fn serve(&mut self, message: Message) {
        match message {
            Message::Halts(Halts { vcpu, lost, mut buffer, back }) => {
                self.write(vcpu, lost, &mut buffer);
                // The vCPU may be gone.
                let _ = back.send(buffer);
            }
            Message::Vcpus(_) => {}
            Message::Flush(done) => {
                self.tell_lost();
                let _ = done.send(());
            }
        }
    }

    /// Writes a block, for whose header `buffer` has room.
    pub(super) fn write(&mut self, vcpu: u32, lost: u64, buffer: &mut [u8]) {
        let halts = (buffer.len().saturating_sub(BLOCK_BYTES) / HALT_BYTES) as u64;
        self.shared.lost.fetch_add(lost, Ordering::Relaxed);
        self.untold += lost;
        if halts == 0 {
            return;
        }
        let bytes = self.shared.bytes.load(Ordering::Relaxed);
        if self.shared.stopped.get().is_none()
            && bytes.saturating_add(buffer.len() as u64) > self.limit_bytes
        {
            let why = format!("it has come to its limit of {} bytes", self.limit_bytes);
            let _ = self.shared.stopped.set(why);
        }
        if self.shared.stopped.get().is_some() {
            self.shared.lost.fetch_add(halts, Ordering::Relaxed);
            self.untold += halts;
            return;
        }
        if let Some(header) = buffer.first_chunk_mut() {
            *header = block_header(vcpu, halts as u32, self.untold);
        }
        if self.put(buffer) {
            self.untold = 0;
            self.shared.halts.fetch_add(halts, Ordering::Relaxed);
        } else {
            self.shared.lost.fetch_add(halts, Ordering::Relaxed);
        }
    }

    /// A block without halts says what was lost after the last with some.
    fn tell_lost(&mut self) {
        if self.untold > 0 && !self.failed && self.put(&block_header(0, 0, self.untold)) {
            self.untold = 0;
        }
    }

    /// One write, so that what is killed in between leaves whole blocks.
    fn put(&mut self, bytes: &[u8]) -> bool {
        match self.output.write_all(bytes) {
            Ok(()) => {
                self.shared.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                true
            }
            Err(error) => {
                self.failed = true;
                let why = format!("it cannot be written: {}", reason(&error));
                if self.shared.stopped.set(why.clone()).is_ok() {
                    devices::tell(format_args!("--record: no more halts are recorded, {why}"));
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halt_poll::Params;
    use halt_poll::recording::{GuestIdle, Halt, Mode, Recording};
    use std::sync::mpsc;

    const HEADER: Header = Header {
        mode: Mode::User,
        vcpus: 2,
        host: Params { max_ns: 0, grow: 2, grow_start_ns: 10_000, shrink: 2 },
        guest_idle: GuestIdle::Halt,
        deadline_lead_ns: 0,
    };

    fn halts(vcpu: u32, lost: u64, count: usize, back: &Sender<Vec<u8>>) -> Message {
        let halt = Halt::from_bytes(&[1; HALT_BYTES]).to_bytes();
        let mut buffer = vec![0; BLOCK_BYTES];
        (0..count).for_each(|_| buffer.extend(halt));
        Message::Halts(Halts { vcpu, lost, buffer, back: back.clone() })
    }

    #[test]
    fn what_is_handed_over_can_be_read_and_buffers_come_back() {
        let (back, given_back) = mpsc::channel();
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, LIMIT_BYTES, &HEADER).unwrap();
        let shared = writer.shared();
        for message in [halts(1, 0, 3, &back), halts(0, 5, 2, &back), halts(1, 2, 0, &back)] {
            writer.serve(message);
        }
        let (done, is_done) = mpsc::sync_channel(1);
        writer.serve(Message::Flush(done));
        is_done.recv().unwrap();
        assert_eq!(given_back.try_iter().count(), 3);
        let recording = Recording::read_from(&file[..]).unwrap();
        assert_eq!(recording.header, HEADER);
        assert_eq!(recording.vcpus.iter().map(Vec::len).collect::<Vec<_>>(), [2, 3]);
        assert_eq!((recording.lost, recording.truncated), (7, false));
        assert_eq!(shared.counts(), (5, 7, file.len() as u64));
        assert_eq!(shared.stopped(), None);
    }

    #[test]
    fn at_its_limit_it_stops_and_tells_what_it_lost() {
        let (back, _given_back) = mpsc::channel();
        let mut file = Vec::new();
        let limit = (HEADER.to_bytes().len() + 2 * (BLOCK_BYTES + 4 * HALT_BYTES)) as u64;
        let mut writer = Writer::new(&mut file, limit, &HEADER).unwrap();
        let shared = writer.shared();
        (0..5).for_each(|_| writer.serve(halts(0, 1, 4, &back)));
        assert_eq!(shared.counts(), (8, 17, limit));
        assert!(shared.stopped().unwrap().contains("limit of 368 bytes"), "{shared:?}");
        writer.tell_lost();
        let recording = Recording::read_from(&file[..]).unwrap();
        assert_eq!((recording.halts(), recording.lost), (8, 17));
    }

    /// A disk with room for so many more bytes.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_ends_the_recording_and_not_the_run() {
        let (back, given_back) = mpsc::channel();
        let mut writer = Writer::new(Full(200), LIMIT_BYTES, &HEADER).unwrap();
        let shared = writer.shared();
        (0..3).for_each(|_| writer.serve(halts(0, 0, 3, &back)));
        assert_eq!(shared.counts().0, 3);
        assert_eq!(shared.counts().1, 6);
        assert!(shared.stopped().unwrap().contains("cannot be written"), "{shared:?}");
        assert_eq!(given_back.try_iter().count(), 3);
    }
}
