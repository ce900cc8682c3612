//! What the guest is to read from a serial port: the user's keys, and lines of the control socket.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use devices::serial::SerialPort;

/// Most bytes that wait for a guest which does not read.
const MAX_WAITING_BYTES: usize = 64 << 10;

/// Bytes on their way into a serial port, which takes few at a time, as the guest reads them.
pub struct PortInput {
    port: Arc<Mutex<SerialPort>>,
    waiting: RefCell<Vec<u8>>,
}

impl PortInput {
    /// Nothing is on its way to `port`.
    pub fn new(port: Arc<Mutex<SerialPort>>) -> Self {
        Self { port, waiting: RefCell::default() }
    }

    /// Whether the port has taken everything.
    pub fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }

    /// Adds `bytes`, all or none of them: `false` if the guest has left too much unread.
    pub fn push(&self, bytes: &[u8]) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        let fits = waiting.len().saturating_add(bytes.len()) <= MAX_WAITING_BYTES;
        if fits {
            waiting.extend_from_slice(bytes);
        }
        fits
    }

    /// Hands the port as much as it takes.
    pub fn offer(&self) {
        let mut waiting = self.waiting.borrow_mut();
        // A vCPU that waits for the reader of its output has the port: later, then.
        if !waiting.is_empty()
            && let Ok(mut port) = self.port.try_lock()
        {
            let taken = port.enqueue(&waiting).min(waiting.len());
            waiting.drain(..taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::bus::BusDevice;
    use devices::irq::IrqLine;

    struct NoIrq;
    impl IrqLine for NoIrq {
        fn pulse(&self) {}
    }

    #[test]
    fn a_guest_reads_all_that_was_pushed_and_what_it_leaves_unread_is_bounded() {
        let sink = Box::new(std::io::sink());
        let port = Arc::new(Mutex::new(SerialPort::new(Arc::new(NoIrq), sink)));
        let input = PortInput::new(Arc::clone(&port));
        let text: Vec<u8> = (0..200).collect();
        assert!(input.push(&text));
        let mut read = Vec::new();
        while !input.is_empty() || read.len() < text.len() {
            input.offer();
            let mut byte = [0];
            port.lock().unwrap().read(0, &mut byte);
            read.push(byte[0]);
        }
        assert_eq!(read, text);
        assert!(input.push(&vec![0; MAX_WAITING_BYTES]));
        assert!(!input.push(&[0]), "nobody reads");
    }
}
