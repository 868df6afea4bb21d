//! Threads that are joined: all threads of a trunk or a tunnel together, or a single thread
//! by its owner.

use dunlin_lane::sync::lock;
use std::io;
use std::sync::Mutex;
use std::thread::{self, JoinHandle};

use dunlin_linux::poll::{Waker, Wakeup, waker};

/// Threads that are joined together.
#[derive(Debug, Default)]
pub(super) struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Threads {
    /// Starts a thread.
    ///
    /// # Errors
    /// An error from clone(2).
    pub(super) fn spawn(
        &self,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let thread = thread::Builder::new().name(name).spawn(body)?;
        let mut threads = lock(&self.0);
        threads.retain(|one| !one.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Waits for all threads, including any that they start during the wait. The caller must have
    /// made them end, and must not be one of them.
    pub(super) fn join(&self) {
        loop {
            let threads = std::mem::take(&mut *lock(&self.0));
            if threads.is_empty() {
                return;
            }
            for thread in threads {
                // The panic hook has printed the panic.
                let _ = thread.join();
            }
        }
    }
}

/// A thread. Dropping the `Worker` stops and joins it.
pub(super) struct Worker {
    stop: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread that runs `body`, which must return when its argument becomes readable.
    ///
    /// # Errors
    /// The process has no free file descriptors, or cannot start a thread.
    pub(super) fn start(
        name: String,
        body: impl FnOnce(&Wakeup) + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = waker()?;
        let thread = thread::Builder::new()
            .name(name)
            .spawn(move || body(&stopped))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            // The panic hook has printed the panic.
            let _ = thread.join();
        }
    }
}
