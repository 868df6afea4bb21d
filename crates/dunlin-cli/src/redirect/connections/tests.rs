//! Tests of which connections count as unprotected.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use super::*;
use crate::redirect::peers::addressed;
use crate::tunnel::Config;

const CONFIG: &str = r#"listen = "0.0.0.0:18300"
identity = "/x"
[redirect.vm]
ports = "49152-49215"
peers = { "192.0.2.1" = "a.test", "192.0.2.2" = "b.test", "2001:db8::2" = "b.test" }
users = ["root"]
"#;

#[test]
fn only_connections_of_a_toolstack_with_a_peer_are_unprotected() {
    let config = Config::parse(Path::new("t.toml"), CONFIG).unwrap();
    let redirects = addressed(config.redirects, 18301).unwrap();
    for (local, peer, expected) in [
        ("192.0.2.1:40000", "192.0.2.2:49152", true),
        ("192.0.2.1:49215", "192.0.2.2:40000", true),
        ("[2001:db8::1]:49160", "[2001:db8::2]:49161", true),
        // A port outside of the range, a host that is not a peer, and a connection of this host
        // with itself.
        ("192.0.2.1:40000", "192.0.2.2:49216", false),
        ("192.0.2.1:40000", "192.0.2.3:49152", false),
        ("192.0.2.1:40000", "192.0.2.1:49152", false),
        // Connections to other services of either host, and to the tunnel.
        ("192.0.2.1:49160", "192.0.2.2:22", false),
        ("192.0.2.1:22", "192.0.2.2:49160", false),
        ("192.0.2.1:49160", "192.0.2.2:18300", false),
        ("192.0.2.1:18300", "192.0.2.2:49160", false),
    ] {
        let [local, peer] = [local, peer].map(|at| at.parse().unwrap());
        let state = TcpConnection::ESTABLISHED;
        let one = TcpConnection { local, peer, state };
        let found = unprotected(&[one], &redirects);
        assert_eq!(found.len(), usize::from(expected), "{one:?}");
        // The tunnel's end of the same connection, if the rules have redirected it.
        let tunnel = TcpConnection {
            local: "127.0.0.1:18301".parse().unwrap(),
            peer: local,
            state,
        };
        let both = [one, tunnel];
        assert_eq!(unprotected(&both, &redirects), []);
        assert_eq!(redirected(&both, Some(&[18301].into())), [local].into());
        assert_eq!(redirected(&both, Some(&[18302].into())), [].into());
    }
}
