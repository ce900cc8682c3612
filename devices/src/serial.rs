//! Serial ports: a 16550A whose bytes go to a sink of the host.
//!
//! Each byte a guest sends is an exit, which cannot be helped; that each is a write system call as
//! well can. Output is collected, and passed on when
//!
//! * a line ends, or [`BUFFER_BYTES`] have come together;
//! * the guest writes the interrupt enable register: Linux does so when it has nothing more to send
//!   (it stops the transmitter's interrupt after the last byte, and its console restores the
//!   register after each message), so a prompt without a newline appears at once;
//! * the guest reads the line status twice without sending between: it polls, for input or because
//!   it has nothing more to send;
//! * the port is [flushed](SerialPort::flush) or dropped.
//!
//! No timer is needed for that, and none disturbs what is measured.

use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::Arc;

use vm_superio::{Serial, Trigger};

use crate::bus::BusDevice;
use crate::irq::IrqLine;

/// Ports of a serial port.
pub const PORTS: u16 = 8;
/// Most bytes of output that are kept back.
pub const BUFFER_BYTES: usize = 256;
/// Most bytes of a line that a [`LineWatcher`] sees; the rest of a longer line is cut off.
pub const MAX_LINE_BYTES: usize = 4096;

/// Interrupt enable register (while the divisor latch is not accessed).
const INTERRUPT_ENABLE: u64 = 1;

/// Line status register.
const LINE_STATUS: u64 = 5;

/// Sees the lines a guest sends through a serial port.
pub trait LineWatcher: Send {
    /// A line is complete. `line` has neither its newline nor a carriage return before it, and at
    /// most [`MAX_LINE_BYTES`]; it may hold any bytes. Called from a vCPU thread under the port's
    /// lock, after the line has gone to the sink.
    fn line(&mut self, line: &[u8]);
}

/// A serial port.
pub struct SerialPort {
    uart: Serial<Line, vm_superio::serial::NoEvents, Output>,
    /// The last access read the line status.
    polled: bool,
}

impl SerialPort {
    /// A port that pulses `irq` and sends its output to `sink`.
    ///
    /// The guest does not learn of errors of the sink: the output is lost, which is told once on
    /// standard error.
    pub fn new(irq: Arc<dyn IrqLine>, sink: Box<dyn Write + Send>) -> Self {
        let output =
            Output { sink, buffer: Vec::with_capacity(BUFFER_BYTES), failed: false, watch: None };
        SerialPort { uart: Serial::new(Line(irq), output), polled: false }
    }

    /// The same port, with `watcher` watching its output.
    #[must_use]
    pub fn watched_by(mut self, watcher: Box<dyn LineWatcher>) -> Self {
        self.uart.writer_mut().watch = Some(Watch { watcher, line: Vec::new() });
        self
    }

    /// Input for the guest. Returns how many bytes the receive buffer had room for, from the front
    /// of `bytes`; none in loopback mode.
    pub fn enqueue(&mut self, bytes: &[u8]) -> usize {
        // The only errors are a full buffer, and an interrupt that cannot fail.
        self.uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    /// Passes all output on to the sink.
    pub fn flush(&mut self) {
        self.uart.writer_mut().pass_on();
    }
}

impl BusDevice for SerialPort {
    /// A wider access is one byte after the other, as on an ISA bus.
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        for (byte, register) in data.iter_mut().zip(offset as u8..=u8::MAX) {
            *byte = self.uart.read(register);
        }
        if std::mem::replace(&mut self.polled, offset == LINE_STATUS) && self.polled {
            self.flush();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        for (&byte, register) in data.iter().zip(offset as u8..=u8::MAX) {
            // Neither the sink nor the interrupt reports an error here.
            let _ = self.uart.write(register, byte);
        }
        self.polled = false;
        if offset == INTERRUPT_ENABLE {
            self.flush();
        }
    }
}

/// The interrupt of a port, as the UART wants it.
struct Line(Arc<dyn IrqLine>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.pulse();
        Ok(())
    }
}

/// The line in progress, and who wants it.
struct Watch {
    watcher: Box<dyn LineWatcher>,
    line: Vec<u8>,
}

impl Watch {
    fn byte(&mut self, byte: u8) {
        if byte == b'\n' {
            let line = self.line.strip_suffix(b"\r").unwrap_or(&self.line);
            self.watcher.line(line);
            self.line.clear();
        } else if self.line.len() < MAX_LINE_BYTES {
            self.line.push(byte);
        }
    }
}

/// What the UART writes to: a byte and a flush at a time.
struct Output {
    sink: Box<dyn Write + Send>,
    buffer: Vec<u8>,
    /// An error was reported.
    failed: bool,
    watch: Option<Watch>,
}

impl Output {
    fn byte(&mut self, byte: u8) {
        self.buffer.push(byte);
        if byte == b'\n' || self.buffer.len() >= BUFFER_BYTES {
            self.pass_on();
        }
        if let Some(watch) = &mut self.watch {
            watch.byte(byte);
        }
    }

    fn pass_on(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let result = self.sink.write_all(&self.buffer).and_then(|()| self.sink.flush());
        self.buffer.clear();
        if let Err(error) = result
            && !std::mem::replace(&mut self.failed, true)
        {
            crate::tell(format_args!("output of a serial port is lost: {error} (told once)"));
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            self.byte(byte);
        }
        Ok(bytes.len())
    }

    /// Called by the UART after each byte: deliberately nothing.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    use proptest::prelude::*;

    use super::*;

    const DATA: u64 = 0;
    const LINE_STATUS: u64 = 5;
    const RECEIVE_INTERRUPT: u8 = 0b01;
    const TRANSMIT_INTERRUPT: u8 = 0b10;

    #[derive(Default)]
    struct Pulses(AtomicU32);

    impl IrqLine for Pulses {
        fn pulse(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// What was written, write by write.
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Sink {
        fn take(&self) -> Vec<Vec<u8>> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Broken;

    impl Write for Broken {
        fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
            Err(io::Error::other("broken"))
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::Error::other("broken"))
        }
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<Vec<u8>>>>);

    impl LineWatcher for Lines {
        fn line(&mut self, line: &[u8]) {
            self.0.lock().unwrap().push(line.to_vec());
        }
    }

    fn port() -> (SerialPort, Arc<Pulses>, Sink) {
        let (pulses, sink) = (Arc::new(Pulses::default()), Sink::default());
        (SerialPort::new(pulses.clone(), Box::new(sink.clone())), pulses, sink)
    }

    fn send(port: &mut SerialPort, bytes: &[u8]) {
        for &byte in bytes {
            port.write(DATA, &[byte]);
        }
    }

    fn read(port: &mut SerialPort, offset: u64) -> u8 {
        let mut data = [0xee];
        port.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn a_line_goes_to_the_sink_in_one_write() {
        let (mut port, _, sink) = port();
        send(&mut port, b"hello\nwor");
        assert_eq!(sink.take(), [b"hello\n".to_vec()]);
    }

    #[test]
    fn a_prompt_appears_when_the_guest_stops_its_transmitter() {
        let (mut port, _, sink) = port();
        port.write(INTERRUPT_ENABLE, &[RECEIVE_INTERRUPT | TRANSMIT_INTERRUPT]);
        send(&mut port, b"login: ");
        assert_eq!(sink.take(), Vec::<Vec<u8>>::new());
        port.write(INTERRUPT_ENABLE, &[RECEIVE_INTERRUPT]);
        assert_eq!(sink.take(), [b"login: ".to_vec()]);
    }

    #[test]
    fn output_appears_when_the_guest_polls_without_sending() {
        let (mut port, _, sink) = port();
        for byte in *b"login: " {
            // How a driver that polls sends: it sees that there is room, and sends.
            read(&mut port, LINE_STATUS);
            send(&mut port, &[byte]);
        }
        read(&mut port, LINE_STATUS);
        assert!(sink.take().is_empty(), "a byte is no system call");
        read(&mut port, LINE_STATUS);
        assert_eq!(sink.take(), [b"login: ".to_vec()]);
    }

    #[test]
    fn a_full_buffer_a_flush_and_a_drop_pass_output_on() {
        let (mut port, _, sink) = port();
        send(&mut port, &[b'x'; BUFFER_BYTES + 1]);
        assert_eq!(sink.take(), [vec![b'x'; BUFFER_BYTES]]);
        port.flush();
        port.flush();
        assert_eq!(sink.take(), [b"x".to_vec()]);
        send(&mut port, b"end");
        drop(port);
        assert_eq!(sink.take(), [b"end".to_vec()]);
    }

    #[test]
    fn a_broken_sink_does_not_stop_the_guest_or_the_watcher() {
        let lines = Lines::default();
        let mut port = SerialPort::new(Arc::new(Pulses::default()), Box::new(Broken))
            .watched_by(Box::new(lines.clone()));
        for _ in 0..3 {
            send(&mut port, b"lost\n");
            assert_eq!(read(&mut port, LINE_STATUS), 0x60);
        }
        assert_eq!(*lines.0.lock().unwrap(), vec![b"lost".to_vec(); 3]);
    }

    #[test]
    fn the_watcher_sees_whole_lines_of_bounded_length() {
        let lines = Lines::default();
        let mut port = port().0.watched_by(Box::new(lines.clone()));
        send(&mut port, b"@mark start\r\n\n");
        send(&mut port, &[b'y'; MAX_LINE_BYTES + 10]);
        assert_eq!(*lines.0.lock().unwrap(), [b"@mark start".to_vec(), Vec::new()]);
        send(&mut port, b"\nnext\n");
        let lines = lines.0.lock().unwrap();
        assert_eq!(lines[2], vec![b'y'; MAX_LINE_BYTES]);
        assert_eq!(lines[3], b"next");
    }

    #[test]
    fn input_raises_one_interrupt_and_takes_what_fits() {
        let (mut port, pulses, _) = port();
        port.write(INTERRUPT_ENABLE, &[RECEIVE_INTERRUPT]);
        let before = pulses.0.load(Ordering::SeqCst);
        let input: Vec<u8> = (0..100).collect();
        let taken = port.enqueue(&input);
        assert!((16..100).contains(&taken));
        assert_eq!(port.enqueue(&input), 0);
        assert_eq!(pulses.0.load(Ordering::SeqCst), before + 1);
        for &byte in &input[..taken] {
            assert_eq!(read(&mut port, LINE_STATUS) & 1, 1);
            assert_eq!(read(&mut port, DATA), byte);
        }
        assert_eq!(read(&mut port, LINE_STATUS) & 1, 0);
        assert_eq!(port.enqueue(&input[taken..]), 100 - taken);
    }

    #[test]
    fn a_wide_access_is_one_byte_after_the_other() {
        let (mut port, _, sink) = port();
        port.write(7, &[0x5a]);
        let mut data = [0; 4];
        port.read(5, &mut data);
        assert_eq!((data[0], data[2]), (0x60, 0x5a));
        port.write(DATA, &[b'a', RECEIVE_INTERRUPT]);
        port.flush();
        assert_eq!(sink.take(), [b"a".to_vec()]);
        assert_eq!(read(&mut port, INTERRUPT_ENABLE), RECEIVE_INTERRUPT);
    }

    proptest! {
        #[test]
        fn random_accesses_never_panic_and_keep_the_transmitter_ready(
            accesses in prop::collection::vec((0u64..8, any::<u8>(), any::<bool>()), 1..200)
        ) {
            let (port, _, sink) = port();
            let mut port = port.watched_by(Box::new(Lines::default()));
            for (offset, value, is_write) in accesses {
                if is_write {
                    port.write(offset, &[value]);
                } else {
                    read(&mut port, offset);
                }
                port.enqueue(&[value; 3]);
                prop_assert_eq!(read(&mut port, LINE_STATUS) & 0x60, 0x60);
            }
            prop_assert!(sink.take().iter().all(|write| write.len() <= BUFFER_BYTES));
        }
    }
}
