//! Compares requests with the kernel's structures, and tries queries on the running kernel. The
//! behaviour of the kernel itself is tested in virtual machines with Debian's kernels
//! (docs/testing/ipsec.md).
#![allow(clippy::unwrap_used)]

use std::mem::offset_of;
use std::net::IpAddr;

use super::*;

/// The structures of include/uapi/linux/xfrm.h in C layout, for their offsets.
mod layout {
    #![allow(dead_code)]

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(super) struct Address([u32; 4]);

    #[repr(C)]
    pub(super) struct Selector {
        pub(super) daddr: Address,
        pub(super) saddr: Address,
        pub(super) dport: u16,
        pub(super) dport_mask: u16,
        pub(super) sport: u16,
        pub(super) sport_mask: u16,
        pub(super) family: u16,
        pub(super) prefixlen_d: u8,
        pub(super) prefixlen_s: u8,
        pub(super) proto: u8,
        pub(super) ifindex: i32,
        pub(super) user: u32,
    }

    #[repr(C)]
    pub(super) struct Id {
        pub(super) daddr: Address,
        pub(super) spi: u32,
        pub(super) proto: u8,
    }

    #[repr(C)]
    pub(super) struct LifetimeConfig {
        pub(super) limits: [u64; 4],
        pub(super) seconds: [u64; 4],
    }

    #[repr(C)]
    pub(super) struct Lifetime {
        pub(super) bytes: u64,
        pub(super) packets: u64,
        pub(super) times: [u64; 2],
    }

    #[repr(C)]
    pub(super) struct Stats {
        pub(super) replay_window: u32,
        pub(super) replay: u32,
        pub(super) integrity_failed: u32,
    }

    #[repr(C)]
    pub(super) struct UserSaInfo {
        pub(super) sel: Selector,
        pub(super) id: Id,
        pub(super) saddr: Address,
        pub(super) lft: LifetimeConfig,
        pub(super) curlft: Lifetime,
        pub(super) stats: Stats,
        pub(super) seq: u32,
        pub(super) reqid: u32,
        pub(super) family: u16,
        pub(super) mode: u8,
        pub(super) replay_window: u8,
        pub(super) flags: u8,
    }

    #[repr(C)]
    pub(super) struct UserSpiInfo {
        pub(super) info: UserSaInfo,
        pub(super) min: u32,
        pub(super) max: u32,
    }

    #[repr(C)]
    pub(super) struct UserSaId {
        pub(super) daddr: Address,
        pub(super) spi: u32,
        pub(super) family: u16,
        pub(super) proto: u8,
    }

    #[repr(C)]
    pub(super) struct UserPolicyInfo {
        pub(super) sel: Selector,
        pub(super) lft: LifetimeConfig,
        pub(super) curlft: Lifetime,
        pub(super) priority: u32,
        pub(super) index: u32,
        pub(super) dir: u8,
        pub(super) action: u8,
        pub(super) flags: u8,
        pub(super) share: u8,
    }

    #[repr(C)]
    pub(super) struct UserTemplate {
        pub(super) id: Id,
        pub(super) family: u16,
        pub(super) saddr: Address,
        pub(super) reqid: u32,
        pub(super) mode: u8,
        pub(super) share: u8,
        pub(super) optional: u8,
        pub(super) aalgos: u32,
        pub(super) ealgos: u32,
        pub(super) calgos: u32,
    }

    #[repr(C)]
    pub(super) struct Encapsulation {
        pub(super) kind: u16,
        pub(super) sport: u16,
        pub(super) dport: u16,
        pub(super) oa: Address,
    }

    const _: () = assert!(size_of::<Selector>() == 56 && size_of::<UserSaInfo>() == 224);
    const _: () = assert!(size_of::<UserSpiInfo>() == 232 && size_of::<UserSaId>() == 24);
    const _: () = assert!(size_of::<UserPolicyInfo>() == 168 && size_of::<UserTemplate>() == 64);
    const _: () = assert!(size_of::<Encapsulation>() == 24);
}

use layout::{Id, LifetimeConfig, UserPolicyInfo, UserSaId, UserSaInfo, UserSpiInfo, UserTemplate};

/// The offset of the body, after the header.
const BODY: usize = 16;

fn addresses() -> (IpAddr, IpAddr) {
    ("10.1.2.3".parse().unwrap(), "10.4.5.6".parse().unwrap())
}

fn selector() -> Selector {
    let (from, to) = addresses();
    Selector {
        source: Network::one(from),
        destination: Network {
            address: to,
            prefix: 24,
        },
        source_ports: PortBlock::ANY,
        destination_ports: PortBlock {
            port: 0x1230,
            mask: 0xfff0,
        },
        protocol: Protocol::TCP,
    }
}

fn state() -> State {
    let (source, destination) = addresses();
    let mut key = [0; KeyAndSalt::BYTES];
    for (target, byte) in key.iter_mut().zip(100..) {
        *target = byte;
    }
    State {
        id: StateId {
            destination,
            spi: 0x0102_0304,
        },
        source,
        reqid: 0x0506_0708,
        direction: Direction::In,
        cpu: Some(3),
        key: KeyAndSalt::new(&key),
        replay_window: 1000,
        encapsulation: Some(Encapsulation {
            source_port: 0x1122,
            destination_port: 0x3344,
        }),
        selector: Some(selector()),
    }
}

/// Returns the value of the attribute `kind` of a request with `fixed` bytes before its attributes.
fn attribute(message: &[u8], fixed: usize, kind: u16) -> Option<&[u8]> {
    let mut rest = &message[BODY + fixed..];
    while !rest.is_empty() {
        let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]]));
        let value = &rest[4..length];
        if u16::from_ne_bytes([rest[2], rest[3]]) == kind {
            return Some(value);
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    None
}

fn at(message: &[u8], offset: usize, bytes: &[u8]) {
    let found = &message[BODY + offset..][..bytes.len()];
    assert_eq!(found, bytes, "at {offset}");
}

#[test]
fn a_request_to_add_an_sa_has_the_kernels_layout() {
    let state = state();
    let mut request = encode::add_state(&state);
    let message = request.finish(7).to_vec();

    let header: Vec<u8> = [
        &(message.len() as u32).to_ne_bytes()[..],
        &0x10_u16.to_ne_bytes(),
        // NLM_F_REQUEST and NLM_F_ACK.
        &5_u16.to_ne_bytes(),
        &7_u32.to_ne_bytes(),
        &0_u32.to_ne_bytes(),
    ]
    .concat();
    assert_eq!(message[..BODY], header[..]);

    let id = offset_of!(UserSaInfo, id);
    at(
        &message,
        id + offset_of!(Id, daddr),
        &[10, 4, 5, 6, 0, 0, 0, 0],
    );
    at(&message, id + offset_of!(Id, spi), &[1, 2, 3, 4]);
    at(&message, id + offset_of!(Id, proto), &[50]);
    at(&message, offset_of!(UserSaInfo, saddr), &[10, 1, 2, 3, 0]);
    let limits = offset_of!(UserSaInfo, lft) + offset_of!(LifetimeConfig, limits);
    at(&message, limits, &[0xff; 32]);
    at(&message, limits + 32, &[0; 32]);
    let reqid = 0x0506_0708_u32.to_ne_bytes();
    at(&message, offset_of!(UserSaInfo, reqid), &reqid);
    let family = 2_u16.to_ne_bytes();
    at(&message, offset_of!(UserSaInfo, family), &family);
    // Transport mode, no legacy replay window, extended sequence numbers.
    at(&message, offset_of!(UserSaInfo, mode), &[0, 0, 128]);
    let given = offset_of!(UserSaInfo, sel);
    at(
        &message,
        given + offset_of!(layout::Selector, dport),
        &[0x12, 0x30, 0xff, 0xf0],
    );
    at(
        &message,
        given + offset_of!(layout::Selector, sport),
        &[0; 4],
    );
    at(
        &message,
        given + offset_of!(layout::Selector, prefixlen_d),
        &[24, 32, 6],
    );
    at(
        &message,
        given + offset_of!(layout::Selector, family),
        &family,
    );

    let of = |kind| attribute(&message, size_of::<UserSaInfo>(), kind).unwrap();
    let aead = of(uapi::XFRMA_ALG_AEAD);
    assert_eq!(aead.len(), 64 + 8 + 36);
    assert!(aead.starts_with(b"rfc4106(gcm(aes))\0"));
    assert_eq!(aead[64..68], 288_u32.to_ne_bytes());
    assert_eq!(aead[68..72], 128_u32.to_ne_bytes());
    assert_eq!(aead[72..], (100..136).collect::<Vec<u8>>()[..]);
    let replay = of(uapi::XFRMA_REPLAY_ESN_VAL);
    assert_eq!(replay.len(), 24 + 4 * 32);
    assert_eq!(replay[..4], 32_u32.to_ne_bytes());
    assert_eq!(replay[20..24], 1000_u32.to_ne_bytes());
    let encapsulation = of(uapi::XFRMA_ENCAP);
    assert_eq!(encapsulation[..2], 2_u16.to_ne_bytes());
    assert_eq!(encapsulation[2..8], [0x11, 0x22, 0x33, 0x44, 0, 0]);
    assert_eq!(of(33), [1]);
    assert_eq!(of(35), 3_u32.to_ne_bytes());
}

#[test]
fn an_outbound_sa_for_all_cpus_has_no_window_and_no_cpu() {
    let outbound = State {
        direction: Direction::Out,
        cpu: None,
        replay_window: 0,
        encapsulation: None,
        selector: None,
        ..state()
    };
    let mut request = encode::add_state(&outbound);
    let message = request.finish(1).to_vec();
    let of = |kind| attribute(&message, size_of::<UserSaInfo>(), kind);
    assert_eq!(of(33), Some(&[2][..]));
    assert_eq!(of(35), None);
    assert_eq!(of(uapi::XFRMA_ENCAP), None);
    assert_eq!(of(uapi::XFRMA_REPLAY_ESN_VAL), Some(&[0; 24][..]));
    at(&message, 0, &[0; 56]);
}

#[test]
fn the_longest_request_fits_without_moving_the_key() {
    let longest = State {
        replay_window: LONGEST_REPLAY_WINDOW,
        ..state()
    };
    let mut request = encode::add_state(&longest);
    assert!(request.finish(1).len() < 1024);
}

#[test]
fn a_request_for_an_spi_has_the_kernels_layout() {
    let (from, to) = addresses();
    let mut request = encode::allocate_spi(from, to, Direction::Out, 3);
    let message = request.finish(1).to_vec();
    at(
        &message,
        offset_of!(UserSpiInfo, min),
        &256_u32.to_ne_bytes(),
    );
    at(
        &message,
        offset_of!(UserSpiInfo, max),
        &u32::MAX.to_ne_bytes(),
    );
    let of = |kind| attribute(&message, size_of::<UserSpiInfo>(), kind);
    assert_eq!(of(33), Some(&[2][..]));
    assert_eq!(of(35), Some(&3_u32.to_ne_bytes()[..]));
}

#[test]
fn the_id_of_an_sa_has_the_kernels_layout() {
    let id = StateId {
        destination: "fd00::9".parse().unwrap(),
        spi: 0x0102_0304,
    };
    let mut request = encode::state_by_id(uapi::XFRM_MSG_DELSA, &id);
    let message = request.finish(1).to_vec();
    assert_eq!(message.len(), BODY + size_of::<UserSaId>());
    at(&message, 0, &[0xfd, 0, 0, 0]);
    at(&message, 15, &[9]);
    at(&message, offset_of!(UserSaId, spi), &[1, 2, 3, 4]);
    at(
        &message,
        offset_of!(UserSaId, family),
        &10_u16.to_ne_bytes(),
    );
    at(&message, offset_of!(UserSaId, proto), &[50]);
}

#[test]
fn a_policy_survives_a_round_trip() {
    let (from, to) = addresses();
    let protect = Action::Protect {
        reqid: 77,
        from,
        to,
    };
    for (action, direction) in [
        (protect, Direction::In),
        (protect, Direction::Out),
        (Action::Block, Direction::Out),
    ] {
        let policy = Policy {
            selector: selector(),
            direction,
            action,
            priority: 12,
        };
        let mut request = encode::add_policy(uapi::XFRM_MSG_NEWPOLICY, &policy);
        let message = request.finish(1).to_vec();
        at(
            &message,
            offset_of!(UserPolicyInfo, priority),
            &12_u32.to_ne_bytes(),
        );
        let blocks = u8::from(action == Action::Block);
        let first = offset_of!(UserPolicyInfo, dir);
        at(
            &message,
            first,
            &[encode::direction_to(direction), blocks, 0, 0],
        );
        let limits = offset_of!(UserPolicyInfo, lft);
        at(&message, limits, &[0xff; 32]);
        let template = attribute(&message, size_of::<UserPolicyInfo>(), uapi::XFRMA_TMPL);
        assert_eq!(template.is_some(), action == protect);
        if let Some(template) = template {
            assert_eq!(template.len(), size_of::<UserTemplate>());
            assert_eq!(template[offset_of!(UserTemplate, aalgos)..], [0xff; 12]);
            let reqid = offset_of!(UserTemplate, reqid);
            assert_eq!(template[reqid..][..4], 77_u32.to_ne_bytes());
        }
        // The kernel answers in the same structures.
        assert_eq!(decode::policy(&message[BODY..]), Ok(Some((policy, 0))));
        let mut forwarded = message;
        forwarded[BODY + first] = uapi::XFRM_POLICY_FWD;
        assert_eq!(decode::policy(&forwarded[BODY..]), Ok(None));
    }
}

#[test]
fn an_installed_sa_is_compared_with_the_request() {
    let state = state();
    let mut request = encode::add_state(&state);
    let message = request.finish(1).to_vec();
    let body = &message[BODY..];
    let installed = decode::state(body).unwrap().unwrap();
    assert_eq!(installed.difference(&state), None);
    assert!(decode::has_key(body, &state.key));
    let other = KeyAndSalt::new(&[0; KeyAndSalt::BYTES]);
    assert!(!decode::has_key(body, &other));
    assert!(!decode::has_key(&body[..224], &state.key));
    let without_cpu = Installed {
        cpu: None,
        ..installed.clone()
    };
    assert_eq!(without_cpu.difference(&state), Some("the CPU"));
    let of_an_older_kernel = Installed {
        direction: None,
        ..installed.clone()
    };
    assert_eq!(of_an_older_kernel.difference(&state), None);
    let the_other_way = Installed {
        direction: Some(Direction::Out),
        ..installed
    };
    assert_eq!(the_other_way.difference(&state), Some("the direction"));
    let text = format!("{state:?}");
    assert!(
        text.contains("KeyAndSalt(..)") && !text.contains("100, 101"),
        "{text}"
    );
}

#[test]
fn truncated_answers_are_errors() {
    let mut request = encode::add_state(&state());
    let message = request.finish(1).to_vec();
    let body = &message[BODY..];
    for length in [0, 100, 223, 225, 230, 300] {
        assert!(decode::state(&body[..length]).is_err(), "{length}");
    }
    assert!(decode::policy(&body[..167]).is_err());
}

/// The kernel that runs this test may lack IPsec, or may not permit access to it: each case has its
/// own error. With IPsec and permission, the test only lists SAs and policies. It changes nothing,
/// because other processes use the same network namespace.
#[test]
fn a_lack_of_ipsec_or_of_permission_has_its_own_error() {
    let xfrm = match Xfrm::open() {
        Ok(xfrm) => xfrm,
        Err(error @ (Error::Absent | Error::NotPermitted { .. })) => {
            println!("here: {error}");
            return;
        }
        Err(other) => panic!("{other}"),
    };
    xfrm.states().unwrap();
    xfrm.policies().unwrap();
}
