//! Every possible CPU can have an SA, even while it is offline.
//! Each network namespace has its own SAs.

use std::fs;
use std::process::ExitCode;

use dunlin_ipsec::xfrm::Xfrm;
use dunlin_kernel_tests::ipsec::lanes::Scene;
use dunlin_kernel_tests::ipsec::{CPUS, Family, Sa, needs_per_cpu};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::affinity::pin_to;

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    ..Needs::NOTHING
};

const LAST: u32 = CPUS - 1;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        needs_per_cpu(guest);
        let scene = Scene::new(guest, Family::V4, [CPUS, CPUS]);
        let (a, b) = (&scene.hosts.a, &scene.hosts.b);
        // The test itself runs in a third namespace, which has no SAs.
        let here = Xfrm::open().expect("the kernel has IPsec");
        assert_eq!(here.states().expect("the kernel answers"), []);
        assert_eq!(here.policies().expect("the kernel answers"), []);
        assert_eq!(a.xfrm.states().expect("the kernel answers").len(), 10);
        assert!(
            a.xfrm
                .remove_state(&scene.there.own[0].id(b))
                .expect("the kernel answers")
        );
        let held = b.xfrm.state(&scene.there.own[0].id(b));
        assert!(
            held.expect("the kernel answers").is_some(),
            "the SA of the other host is gone"
        );

        let lane = scene.lane(LAST);
        assert_eq!(scene.there(|| lane.send(LAST, 50_000)), [Some(LAST)]);
        let off = guest.set(&format!("/sys/devices/system/cpu/cpu{LAST}/online"), "0");
        pin_to(LAST as usize).expect_err("the CPU is offline");
        // A connection that was made on CPU `LAST`, which is now offline, works on other CPUs.
        assert_eq!(scene.there(|| lane.send(1, 50_000)), [Some(LAST)]);
        let possible = fs::read_to_string("/sys/devices/system/cpu/possible");
        assert_eq!(
            possible.expect("sysfs is mounted").trim_end(),
            format!("0-{LAST}")
        );
        // While the CPU is offline, a second SA for it is added. This SA takes over the traffic of
        // the first SA.
        let next = Sa::new(0x3000).of_cpu(LAST);
        next.add(a, b);
        drop(off);
        assert_eq!(scene.there(|| lane.send(LAST, 50_000)), []);
        assert!(a.carried(&next.id(b)).packets > 0);
    })
}
