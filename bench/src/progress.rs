//! How far the bench is: a bar on a terminal, lines elsewhere. On standard error.

use std::io::Write as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Runs done and to do, and the time that is left.
pub struct Progress(ProgressBar);

impl Progress {
    /// Shown on standard error.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) =
            ProgressStyle::with_template("{bar:24} {pos}/{len} {eta} left  {wide_msg}")
        {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// There are so many runs to be made.
    pub fn start(&self, runs: usize) {
        self.0.set_length(runs as u64);
        self.0.reset();
        self.0.enable_steady_tick(std::time::Duration::from_secs(1));
    }

    /// What is being done.
    pub fn tell(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// A run is done: what it came to.
    pub fn done(&self, what: &str) {
        self.0.inc(1);
        self.line(what);
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        if self.0.is_hidden() {
            let (done, all) = (self.0.position(), self.0.length().unwrap_or(0));
            // Nobody to read it is no error of ours.
            let _ = writeln!(std::io::stderr(), "[{done}/{all}] {text}");
        } else {
            self.0.println(text);
        }
    }

    /// The bar goes.
    pub fn end(&self) {
        self.0.finish_and_clear();
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}
