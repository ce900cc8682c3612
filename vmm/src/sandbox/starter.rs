//! The thread that starts disks' workers. A guest makes its driver start them, on a vCPU's thread, which
//! for that reason alone would have to be able to start threads, and workers to do all that vCPUs do.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::{Builder, JoinHandle};

use virtio_blk::StartThread;

use super::{Kind, Sandbox};

static TOLD: Once = Once::new();

/// What a thread runs.
type Body = Box<dyn FnOnce() + Send>;

/// A thread that is to be started.
struct Order {
    builder: Builder,
    body: Body,
    started: SyncSender<io::Result<JoinHandle<()>>>,
}

/// The thread before it runs: disks learn how to order workers when they are made, which is before the
/// process is confined.
pub struct Starter {
    start: StartThread,
    queue: Receiver<Order>,
}

impl Default for Starter {
    /// Takes orders, and carries none out yet.
    fn default() -> Self {
        let (orders, queue) = mpsc::channel();
        Self { start: order_from(orders), queue }
    }
}

impl Starter {
    /// Has a worker started, once [`begin`](Self::begin) was called. The thread lives as long as the
    /// last of these.
    pub fn orders(&self) -> StartThread {
        self.start.clone()
    }

    /// Starts the thread. Workers enter the sandbox of their kind.
    ///
    /// # Errors
    /// The host refused a thread, or its sandbox.
    pub fn begin(self, sandbox: &Sandbox) -> io::Result<()> {
        let Self { queue, .. } = self;
        let sandbox = sandbox.clone();
        let (entered, has_entered) = mpsc::sync_channel(1);
        Builder::new().name("starter".into()).spawn(move || {
            let mine = sandbox.enter(Kind::Starter);
            let queue = mine.is_ok().then_some(queue);
            let _ = entered.send(mine);
            for Order { builder, body, started } in queue.into_iter().flatten() {
                let sandbox = sandbox.clone();
                let result = builder.spawn(move || match sandbox.enter(Kind::Worker) {
                    Ok(()) => body(),
                    // Who waits for the worker's first word sees that there is none, and may try for ever.
                    Err(error) => TOLD.call_once(|| {
                        devices::tell(format_args!("a worker has no sandbox: {error} (told once)"));
                    }),
                });
                let _ = started.send(result);
            }
        })?;
        has_entered.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
    }
}

fn order_from(orders: Sender<Order>) -> StartThread {
    let orders = Mutex::new(orders);
    Arc::new(move |builder, body| {
        let (started, has_started) = mpsc::sync_channel(1);
        let order = Order { builder, body, started };
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        orders.lock().unwrap_or_else(PoisonError::into_inner).send(order).map_err(|_| gone())?;
        has_started.recv().map_err(|_| gone())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_started_with_their_names() {
        let starter = Starter::default();
        let start = starter.orders();
        starter.begin(&Sandbox::default()).unwrap();
        for name in ["blk0-q0", "blk1-q3"] {
            let (tell, told) = mpsc::channel();
            let body = Box::new(move || {
                let _ = tell.send(std::thread::current().name().map(str::to_owned));
            });
            let thread = start(Builder::new().name(name.into()), body).unwrap();
            assert_eq!(told.recv().unwrap().as_deref(), Some(name));
            thread.join().unwrap();
        }
    }
}
