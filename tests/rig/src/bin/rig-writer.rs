//! The only process of a Linux guest: fills its pages, writes to them, checks them and reports. The
//! library's module `guest` describes the workload and the protocol.
//!
//! Arguments: pages, hot pages, stride, content, visits per second (0 for no limit), seed. The
//! build script compiles this file separately, so it uses only the standard library.
#![forbid(unsafe_code)]

use std::env;
use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PAGE_WORDS: usize = 512;
const SIGNATURE: u64 = 0x9e37_79b9_7f4a_7c15;
const BEAT: Duration = Duration::from_millis(50);
/// The number of visits between two reads of the clock if there is no rate limit.
const BATCH: usize = 64;

fn main() {
    let numbers: Vec<u64> = env::args()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    let Ok([pages, hot, stride, content, rate, seed]) = <[u64; 6]>::try_from(numbers) else {
        say("the writer takes six numbers");
        rest();
    };
    let mut writer = Writer {
        pages: vec![Page([0; PAGE_WORDS]); index(pages)],
        hot: index(hot),
        stride: index(stride),
        content,
        seed,
        cursor: 0,
        cold_cursor: 0,
        left: index(hot),
        passes: 0,
        visits: 0,
    };
    writer.fill();
    // The last number of this line is the rate of the guest's clock, which counts nanoseconds.
    say(&format!("ready {pages:x} {hot:x} {:x}", 1_000_000_000));
    let asked = commands();
    if let Err(wrong) = run(&mut writer, rate, &asked) {
        say(&format!(
            "wrong {:x} {:x} {:x}",
            wrong.page, wrong.expected, wrong.found
        ));
    }
    rest();
}

fn run(writer: &mut Writer, rate: u64, asked: &AtomicBool) -> Result<(), Wrong> {
    let period = (rate > 0).then(|| Duration::from_nanos(1_000_000_000 / rate));
    let mut next_beat = Instant::now();
    let mut next_visit = next_beat;
    loop {
        let now = Instant::now();
        if now >= next_beat {
            next_beat = now + BEAT;
            say(&format!("beat {:x} {:x}", writer.visits, writer.passes));
            if asked.swap(false, Ordering::Acquire) {
                writer.check_all()?;
                say(&format!(
                    "checked {:x} {:x}",
                    writer.pages.len(),
                    writer.passes
                ));
            }
        }
        let idle = match period {
            _ if writer.hot == 0 => next_beat - now,
            Some(_) if now < next_visit => (next_visit - now).min(next_beat.duration_since(now)),
            _ => Duration::ZERO,
        };
        if !idle.is_zero() {
            thread::sleep(idle);
            continue;
        }
        let Some(period) = period else {
            for _ in 0..BATCH {
                writer.visit()?;
            }
            continue;
        };
        // Drop visits that are overdue by more than the time between two reports, so that a guest
        // does not catch up after a pause.
        let earliest = now.checked_sub(BEAT).unwrap_or(now);
        next_visit = (next_visit + period).max(earliest);
        writer.visit()?;
    }
}

/// A mismatch between a page's expected and actual contents.
struct Wrong {
    page: usize,
    expected: u64,
    found: u64,
}

/// A page of memory, aligned so that it occupies exactly one page of the guest's memory.
#[derive(Clone)]
#[repr(align(4096))]
struct Page([u64; PAGE_WORDS]);

struct Writer {
    pages: Vec<Page>,
    hot: usize,
    stride: usize,
    content: u64,
    seed: u64,
    /// The next hot page.
    cursor: usize,
    /// The next page that is not hot. These pages begin at `hot`.
    cold_cursor: usize,
    /// The remaining visits of this pass.
    left: usize,
    passes: u64,
    visits: u64,
}

impl Writer {
    fn fill(&mut self) {
        for page in 0..self.pages.len() {
            let signature = self.signature(page);
            if signature == 0 {
                continue;
            }
            let text = self.content == 3;
            let words = &mut self.pages[page].0;
            let mut word = signature;
            let mut missing = signature;
            for place in &mut words[1..PAGE_WORDS - 1] {
                if text {
                    word = word.rotate_left(8);
                } else {
                    word ^= word << 13;
                    word ^= word >> 7;
                    word ^= word << 17;
                }
                *place = word;
                missing ^= word;
            }
            words[PAGE_WORDS - 1] = missing;
        }
    }

    fn visit(&mut self) -> Result<(), Wrong> {
        let passes = self.passes;
        self.check(self.cursor, passes)?;
        let words = &mut self.pages[self.cursor].0;
        words[0] = passes + 1;
        words[PAGE_WORDS - 1] ^= passes ^ (passes + 1);
        self.visits += 1;
        self.cursor = (self.cursor + self.stride) % self.hot;
        self.left -= 1;
        if self.left == 0 {
            self.left = self.hot;
            self.passes += 1;
        }
        if self.hot < self.pages.len() {
            self.check(self.hot + self.cold_cursor, 0)?;
            self.cold_cursor = (self.cold_cursor + 1) % (self.pages.len() - self.hot);
        }
        Ok(())
    }

    /// Finishes the pass, so that all hot pages have the same number of visits, and checks all
    /// pages.
    fn check_all(&mut self) -> Result<(), Wrong> {
        while self.left != self.hot {
            self.visit()?;
        }
        for page in 0..self.pages.len() {
            let visits = if page < self.hot { self.passes } else { 0 };
            self.check(page, visits)?;
        }
        Ok(())
    }

    fn check(&self, page: usize, visits: u64) -> Result<(), Wrong> {
        let signature = self.signature(page);
        let words = &self.pages[page].0;
        let found = words.iter().fold(0, |all, word| all ^ word);
        for (expected, found) in [(visits, words[0]), (signature, found)] {
            if expected != found {
                return Err(Wrong {
                    page,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }

    fn signature(&self, page: usize) -> u64 {
        match self.content {
            0 => 0,
            2 if page.is_multiple_of(2) => 0,
            _ => SIGNATURE.wrapping_mul(page as u64 + 1) ^ self.seed,
        }
    }
}

/// Returns a flag that is set whenever a line that begins with `c` arrives on standard input.
fn commands() -> Arc<AtomicBool> {
    let asked = Arc::new(AtomicBool::new(false));
    let setter = Arc::clone(&asked);
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            match line {
                Ok(line) if line.starts_with('c') => setter.store(true, Ordering::Release),
                Ok(_) => {}
                Err(_) => break,
            }
        }
    });
    asked
}

/// Writes a whole line while holding the lock on standard output.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// Waits forever, because the first process of a system must not exit.
fn rest() -> ! {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(content: u64) -> Writer {
        let mut writer = Writer {
            pages: vec![Page([0; PAGE_WORDS]); 20],
            hot: 7,
            stride: 3,
            content,
            seed: 5,
            cursor: 0,
            cold_cursor: 0,
            left: 7,
            passes: 0,
            visits: 0,
        };
        writer.fill();
        writer
    }

    #[test]
    fn visits_leave_every_page_right_and_a_changed_word_is_found() {
        for content in 0..4 {
            let mut writer = writer(content);
            for _ in 0..45 {
                assert!(writer.visit().is_ok());
            }
            assert!(writer.check_all().is_ok());
            assert_eq!((writer.passes, writer.visits), (7, 49));
            for page in 0..20 {
                for word in [0, 1, 300, 511] {
                    writer.pages[page].0[word] ^= 1 << 40;
                    let found = writer.check_all().err().map(|wrong| wrong.page);
                    assert_eq!(found, Some(page));
                    writer.pages[page].0[word] ^= 1 << 40;
                }
            }
        }
    }
}
