//! Tests that, after the first pass, no lane thread of either side allocates memory for a chunk.
//! The test is alone in its process, because the counter replaces the process's allocator.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin::engine::vmm::SourceVm;
use dunlin::engine::{Connector, Event, Host, StandardHost, Wakeup};
use dunlin::{Incoming, Migration};
use dunlin_rig::linux::allocations::{Counting, allocations, count_this_thread};
use dunlin_test_support::engine::{TestBuilder, TestVm, tls, verified};

/// The numbers of allocations at two times: when the buffers had reached their final size, and when
/// the guest was paused.
static WARM: AtomicU64 = AtomicU64::new(0);
static PAUSED: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A host that starts the count of allocations on each lane's thread, on both sides.
struct Marking;

impl Connector for Marking {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        StandardHost.connect(endpoint, deadline, stop)
    }
}

impl Host for Marking {
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        let lane = name.starts_with("dunlin-lane-");
        StandardHost.spawn(
            name,
            Box::new(move || {
                count_this_thread(lane);
                body();
            }),
        )
    }
}

#[test]
fn i8_no_chunk_allocates_on_a_lane_at_either_side() {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let host: Arc<dyn Host> = Arc::new(Marking);
    let vm = TestVm::new(192 << 20);
    vm.fill(96 << 20);
    vm.start(10_000, Duration::ZERO);
    let as_source: Arc<dyn SourceVm> = Arc::clone(&vm) as _;
    let warm = |event: &Event| match event {
        // The first pass has filled every buffer.
        Event::Iterated(one) if one.number == 1 => WARM.store(allocations(), Ordering::SeqCst),
        Event::Paused => PAUSED.store(allocations(), Ordering::SeqCst),
        _ => {}
    };
    // These limits make the migration run several passes of many chunks.
    let options = verified(2)
        .to_builder()
        .rate(200 << 20)
        .downtime_limit(Duration::from_millis(40))
        .time_limit(Duration::from_millis(2500))
        .at_time_limit(dunlin::engine::source::AtTimeLimit::Stop)
        .throttle(false)
        .build()
        .unwrap();
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            Incoming::builder(listener, &server)
                .host(Arc::clone(&host))
                .run(&mut TestBuilder::default())
                .map(|_| ())
                .unwrap();
        });
        Migration::builder(Arc::clone(&as_source), &to, &client)
            .options(options.clone())
            .host(Arc::clone(&host))
            .observer(&warm)
            .run()
            .unwrap()
    });
    let passes = &report.iterations[1..report.iterations.len() - 1];
    let chunks: u64 = passes.iter().map(|pass| pass.pages / 64).sum();
    let allocations = PAUSED.load(Ordering::SeqCst) - WARM.load(Ordering::SeqCst);
    println!("{allocations} allocations for {chunks} chunks");
    assert!(chunks > 300, "{chunks}");
    // The remaining allocations are those of the queues between threads, which allocate one block
    // for many events.
    assert!(
        allocations * 20 < chunks,
        "{allocations} allocations for {chunks} chunks"
    );
}
