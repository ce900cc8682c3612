//! A client of the control socket: any bytes, in any pieces, mostly requests. Each line has one reply,
//! which is a JSON object of bounded length; a request that failed has changed nothing.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use devices::irq::IrqLine;
use devices::serial::SerialPort;
use serde_json::Value as Json;
use tempfile::TempDir;
use virtio_blk::{Block, Disk};
use vmm::cli::{self, Command};
use vmm::config::VmConfig;
use vmm::control::commands::Live;
use vmm::control::server::{MAX_REQUEST_BYTES, Server};
use vmm::input::PortInput;
use vmm::lifecycle::Lifecycle;
use vmm::stats::channel::GuestReport;
use vmm::stats::{DiskSource, Sources};
use vmm::tuning::HostTuning;
use vmm::vcpu::polling::{Polling, SharedParams, params};

use crate::input::Input;

/// More than any reply: what a request says comes back in it, escaped twice.
const MAX_REPLY_BYTES: usize = 16 * MAX_REQUEST_BYTES;
const MAX_SENT_BYTES: usize = MAX_REQUEST_BYTES + 1024;
const DISK_BYTES: u64 = 1 << 20;

/// What requests are made of.
const TOKENS: [&str; 40] = [
    "{\"command\":\"status\"}\n",
    "{\"command\":\"stats\"}\n",
    "{\"command\":\"stop\"}\n",
    "{\"command\":\"resize\",\"disk\":\"blk0\"}\n",
    "{\"command\":\"send\",\"line\":\"hello\"}\n",
    "{\"command\":\"set\",\"parameters\":{\"halt_poll_ns\":\"200us\"}}\n",
    "{\"command\":\"set\",\"parameters\":{",
    "\"halt_poll_ns\":",
    "\"halt_poll_ns_grow\":",
    "\"halt_poll_ns_grow_start\":",
    "\"halt_poll_ns_shrink\":",
    "\"io_poll_ns\":",
    "}}\n",
    "\n",
    "\r\n",
    "0",
    "1",
    "-1",
    "18446744073709551616",
    "4294967295",
    "1e999",
    "\"1ms\"",
    "\"9999999999s\"",
    "null",
    "true",
    ",",
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    "\\n",
    "\\u0000",
    "\\ud800",
    "{\"command\":\"send\",\"line\":\"",
    "{\"command\":\"resize\",\"disk\":\"",
    "\"}\n",
    "\u{7f}\u{1b}[2J",
    "é",
];

struct NoIrq;

impl IrqLine for NoIrq {
    fn pulse(&self) {}
}

/// A VM as far as the socket reaches it, without vCPUs.
struct World {
    server: Server,
    path: PathBuf,
    config: VmConfig,
    sources: Sources,
    tuning: HostTuning,
    polling: Polling,
    /// Of the socket, the disk, and parameters that no host has.
    _directory: TempDir,
}

thread_local! {
    static WORLD: std::cell::RefCell<World> = std::cell::RefCell::new(World::new());
}

impl World {
    fn new() -> World {
        let directory = tempfile::tempdir().expect("a directory");
        let place = |name| directory.path().join(name);
        let (path, disk) = (place("control"), place("disk"));
        std::fs::File::create(&disk).and_then(|file| file.set_len(DISK_BYTES)).expect("a disk");
        let config = config(&disk);
        let blk = config.disks[0].clone();
        let block = Block::new(blk.clone(), Disk::open(&blk).expect("opens"));
        let disks = vec![DiskSource { name: "blk0".into(), device: block.handle() }];
        let sources = Sources { start: Instant::now(), vcpus: Vec::new(), disks };
        World {
            server: Server::listen(&path).expect("listens"),
            path,
            polling: Polling::User(Arc::new(SharedParams::new(params(&config.halt_poll)))),
            tuning: HostTuning::new(directory.path(), &[]).expect("changes nothing"),
            config,
            sources,
            _directory: directory,
        }
    }
}

fn config(disk: &Path) -> VmConfig {
    let disk = format!("path={}", disk.display());
    // Any file is a kernel before it is read.
    let words = ["pollux", "run", "--kernel", "/proc/self/exe", "--halt", "user", "--disk", &disk];
    match cli::parse(words.map(Into::into)).map(|cli| cli.command) {
        Ok(Command::Run(args)) => VmConfig::new(&args).expect("good options"),
        _ => panic!("good words"),
    }
}

/// The target.
pub fn run(bytes: &[u8]) {
    WORLD.with_borrow_mut(|world| world.play(&mut Input::new(bytes)));
}

/// What a client says, and where it pauses.
fn script(input: &mut Input) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut pauses) = (Vec::new(), Vec::new());
    while !input.is_empty() && bytes.len() < MAX_SENT_BYTES {
        match input.u8() {
            at @ 0..=0xbf => bytes.extend(TOKENS[usize::from(at) % TOKENS.len()].as_bytes()),
            0xc0..=0xdf => {
                let count = 1 + usize::from(input.u8() % 16);
                bytes.extend(input.bytes(count));
            }
            0xe0..=0xef => pauses.push(bytes.len()),
            0xf0..=0xfb => {
                let count = usize::from(input.u8());
                bytes.extend(vec![input.u8(); count]);
            }
            // About as long as a request may be.
            _ => {
                let line = bytes.iter().rev().take_while(|&&byte| byte != b'\n').count();
                let room = MAX_REQUEST_BYTES.saturating_sub(line);
                let more = usize::from(input.u8() % 4);
                bytes.extend(vec![b'x'; (room + more).saturating_sub(2)]);
            }
        }
    }
    pauses.push(bytes.len());
    (bytes, pauses)
}

/// How many replies a client that says this gets.
fn expected(mut said: &[u8]) -> usize {
    let mut replies = 0;
    loop {
        match said.iter().position(|&byte| byte == b'\n') {
            Some(end) if end < MAX_REQUEST_BYTES => {
                replies += 1;
                said = &said[end + 1..];
            }
            // Too long: told so, and nothing more.
            _ => return replies + usize::from(said.len() >= MAX_REQUEST_BYTES),
        }
    }
}

impl World {
    fn play(&mut self, input: &mut Input) {
        let (said, pauses) = script(input);
        let lifecycle = Lifecycle::new().expect("an eventfd");
        let port = SerialPort::new(Arc::new(NoIrq), Box::new(std::io::sink()));
        let results = PortInput::new(Arc::new(Mutex::new(port)));
        let (guest, sources) = (Mutex::new(GuestReport::default()), &self.sources);
        let mut config = self.config.clone();
        let mut live = Live {
            config: &mut config,
            sources,
            guest: &guest,
            recorder: None,
            results: Some(&results),
            lifecycle: &lifecycle,
            polling: &self.polling,
            tuning: &self.tuning,
            snapshot: &|| sources.snapshot(),
        };
        let mut answers = 0;
        let mut answer = |line: &[u8]| {
            answers += 1;
            assert!(line.len() < MAX_REQUEST_BYTES);
            let in_force = |live: &Live<'_>| serde_json::to_value(&*live.config).expect("JSON");
            let before = in_force(&live);
            let reply = live.answer(line);
            let done = reply["ok"].as_bool().expect("it says whether it was done");
            assert!(done || before == in_force(&live), "a refusal changes nothing");
            assert_eq!(done, reply.get("error").is_none());
            results.offer();
            reply
        };

        let mut client = UnixStream::connect(&self.path).expect("it listens");
        client.set_nonblocking(true).expect("non-blocking");
        let (mut replies, mut sent, mut over) = (Vec::new(), 0, false);
        for pause in pauses {
            while sent < pause && !over {
                match client.write(&said[sent..pause]) {
                    Ok(count) => sent += count,
                    Err(why) if why.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => over = true,
                }
                self.server.serve(&mut answer);
                over |= receive(&mut client, &mut replies);
            }
            self.server.serve(&mut answer);
        }
        // Nothing but an end is missing now: it comes in as many turns as there are lines, or fewer.
        let _ = client.shutdown(std::net::Shutdown::Write);
        for _ in 0..=said.len() + 16 {
            if over {
                break;
            }
            self.server.serve(&mut answer);
            over = receive(&mut client, &mut replies);
        }
        assert!(over, "the server parts with a client that has said everything");

        let text = String::from_utf8(replies).expect("UTF-8");
        assert!(text.is_empty() || text.ends_with('\n'));
        for line in text.lines() {
            assert!(line.len() <= MAX_REPLY_BYTES, "{} bytes", line.len());
            let reply: Json = serde_json::from_str(line).expect("JSON");
            assert!(reply["ok"].is_boolean() && reply.is_object(), "{line}");
            let error = reply["error"].as_str().unwrap_or_default();
            assert!(!error.chars().any(char::is_control), "{line}");
        }
        assert_eq!(text.lines().count(), expected(&said), "a reply for each line");
        assert!(answers <= text.lines().count());
    }
}

/// Takes what has come; true at the end.
fn receive(client: &mut UnixStream, replies: &mut Vec<u8>) -> bool {
    let mut bytes = [0; 0x4000];
    loop {
        match client.read(&mut bytes) {
            Ok(0) => return true,
            Ok(count) => replies.extend(&bytes[..count]),
            Err(why) if why.kind() == ErrorKind::WouldBlock => return false,
            // What was not read of what we sent resets the connection.
            Err(_) => return true,
        }
    }
}
