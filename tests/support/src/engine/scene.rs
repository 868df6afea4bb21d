//! A migration through a [`Proxy`], which injects faults at the points that a test selects.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::Migration;
use dunlin::engine::destination;
use dunlin::engine::source;
use dunlin::engine::vmm::SourceVm;
use dunlin::engine::{Cancel, Event, MigrateError, Report};
use dunlin_lane::policy::{ClientTls, ServerTls};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::proxy::Proxy;
use super::{Memory, Receiving, TestBuilder, TestVm};

/// The number of pages at the beginning of memory to which the guest writes continuously.
pub const HOT_PAGES: u64 = 64;

/// A destination behind a proxy, and a guest that writes.
pub struct Scene {
    pub vm: Arc<TestVm>,
    pub receiving: Receiving,
    pub proxy: Proxy,
    pub client: ClientTls,
    pub cancel: Cancel,
    /// The number of pages to which the guest writes.
    pub hot_pages: u64,
    pub events: Mutex<Vec<Event>>,
    pub came: Condvar,
}

impl Scene {
    pub fn new(tls: &(ClientTls, ServerTls), mebibytes: usize) -> Self {
        Self::with(tls, mebibytes, &patient(), HOT_PAGES)
    }

    pub fn with(
        tls: &(ClientTls, ServerTls),
        mebibytes: usize,
        options: &destination::Options,
        hot_pages: u64,
    ) -> Self {
        let receiving = Receiving::start(&tls.1, options, TestBuilder::default());
        let proxy = Proxy::start(receiving.address);
        let vm = TestVm::new(16 << 20);
        vm.fill(mebibytes << 19);
        vm.start(hot_pages, Duration::from_micros(100));
        Self {
            vm,
            receiving,
            proxy,
            client: tls.0.clone(),
            cancel: Cancel::new(),
            hot_pages,
            events: Mutex::default(),
            came: Condvar::new(),
        }
    }

    pub fn send(&self, options: &source::Options) -> Result<Report, MigrateError> {
        self.send_with(options, |_| {})
    }

    pub fn send_with(
        &self,
        options: &source::Options,
        on: impl Fn(&Event) + Send + Sync,
    ) -> Result<Report, MigrateError> {
        let vm: Arc<dyn SourceVm> = Arc::clone(&self.vm) as _;
        let observe = |event: &Event| {
            on(event);
            self.events.lock().unwrap().push(event.clone());
            self.came.notify_all();
        };
        let to = self.proxy.address.to_string();
        Migration::builder(vm, to, &self.client)
            .options(options.clone())
            .observer(&observe)
            .cancel(&self.cancel)
            .run()
    }

    /// Waits until the source has reported `count` events for which `which` returns true.
    pub fn await_events(&self, count: usize, which: impl Fn(&Event) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        let mut events = self.events.lock().unwrap();
        while events.iter().filter(|event| which(event)).count() < count {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{events:?}");
            events = self.came.wait_timeout(events, left).unwrap().0;
        }
    }

    pub fn lost(&self) -> Vec<u16> {
        let events = self.events.lock().unwrap();
        let lane = |event: &Event| match event {
            Event::LaneLost { lane, .. } => Some(*lane),
            _ => None,
        };
        events.iter().filter_map(lane).collect()
    }

    /// Waits for the destination and asserts that its memory equals the source's.
    pub fn finish(self, report: &Report) {
        assert_eq!(report.digests_equal, Some(true));
        let (received, builder, _) = self.receiving.finish(false);
        assert!(received.unwrap().runs);
        let there = builder.built.unwrap();
        assert!(pages(&self.vm.memory) == pages(&there.memory));
    }
}

pub fn pages(memory: &Memory) -> Vec<Vec<u8>> {
    let bytes = |start: GuestAddress, length: u64| {
        let mut bytes = vec![0; length as usize];
        memory.read_slice(&mut bytes, start).unwrap();
        bytes
    };
    memory
        .iter()
        .map(|region| bytes(region.start_addr(), region.len()))
        .collect()
}

pub fn patient() -> destination::Options {
    destination::Options::builder()
        .silence_limit(Duration::from_millis(600))
        .control_limit(Duration::from_secs(10))
        .build()
        .unwrap()
}

/// Limits short enough for a test, and a rate so low that a test can inject faults in time.
pub fn quick(lanes: u16, mebibytes_per_s: u64) -> source::Options {
    source::Options::builder()
        .lanes(lanes)
        .verify(true)
        .rate(Some(mebibytes_per_s << 20))
        .connect_limit(Duration::from_millis(1500))
        .lane_stall_limit(Duration::from_millis(700))
        .no_lane_limit(Duration::from_secs(10))
        .silence_limit(Duration::from_secs(1))
        .control_limit(Duration::from_secs(10))
        // The limit allows for the digests and for a busy host.
        .downtime_limit(Duration::from_secs(2))
        .build()
        .unwrap()
}

/// The number of repetitions of each test that depends on chance.
pub fn rounds() -> usize {
    if std::env::var_os("DUNLIN_SOAK").is_some_and(|set| set == "1") {
        20
    } else {
        1
    }
}

/// Runs `each` for all cases, six at a time, because a case spends most of its time waiting.
pub fn side_by_side<T: Sync>(cases: &[T], each: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
                    each(case);
                }
            });
        }
    });
}

pub fn is_up(event: &Event) -> bool {
    matches!(event, Event::LaneUp { .. })
}

pub fn is_lost(event: &Event) -> bool {
    matches!(event, Event::LaneLost { .. })
}
