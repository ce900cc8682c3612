//! The control socket (`--control PATH`): a Unix stream socket of mode 0600 on which whoever may
//! open it asks, changes or stops the VM; and `pollux ctl`, which does so from a shell.
//!
//! Each request is a JSON object on a line, and so is each reply, in the same order:
//!
//! | request | reply, besides `"ok": true` |
//! |---|---|
//! | `{"command": "status"}` | `state`, `end`, `pid`, `uptime_ns`, `halt`, `cpus`, `memory_bytes`, `disks` |
//! | `{"command": "stats"}` | `stats`: the document of `--stats`, with `end` null |
//! | `{"command": "resize", "disk": "blk0"}` | `disk`, `old_capacity_bytes`, `new_capacity_bytes` |
//! | `{"command": "set", "parameters": {"halt_poll_ns": "200us"}}` | `set`: the parameters and their values |
//! | `{"command": "stop"}` | `state`: `stopping`; the connection closes at the end of Pollux |
//!
//! A refusal is `{"ok": false, "error": "one line"}`, and the connection stays.
//!
//! The main thread serves the socket from its event loop, beside the terminal and the signals, and
//! never waits for a client. What clients can cost is bounded: [`server::MAX_CLIENTS`] of them, each
//! with a request of at most [`server::MAX_REQUEST_BYTES`] and one reply that it has not read yet.

pub mod client;
pub mod commands;
pub mod server;
