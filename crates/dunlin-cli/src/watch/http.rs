//! HTTP/1.1 for the status page: one request per connection, GET and HEAD only. Everything that a
//! client sends, and the time that it takes, is bounded (I7).

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use dunlin_linux::socket::remaining;

/// Maximum length of a request with its headers. Browsers send less than 2 KiB.
const HEAD_LIMIT_BYTES: usize = 8 * 1024;
const MAX_HEADERS: usize = 64;
/// Maximum number of parts in which a request arrives. Each part costs CPU time.
const MAX_PARTS: usize = 64;
/// How long a client may take to send its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(3);
/// How long a client may take to read the answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

pub(super) trait Connection: Read + Write + Send {
    /// Limits the time of each following read and write.
    fn set_limit(&self, limit: Duration) -> io::Result<()>;

    /// The address of this host to which the client has connected. For a unix socket, this is the
    /// loopback address, because only programs of this host can connect to the socket.
    fn local(&self) -> io::Result<IpAddr>;
}

impl Connection for TcpStream {
    fn set_limit(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }

    fn local(&self) -> io::Result<IpAddr> {
        Ok(self.local_addr()?.ip().to_canonical())
    }
}

impl Connection for UnixStream {
    fn set_limit(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }

    fn local(&self) -> io::Result<IpAddr> {
        Ok(Ipv4Addr::LOCALHOST.into())
    }
}

/// A valid request to this process.
#[derive(Debug)]
pub(super) struct Request {
    /// The path without the query.
    pub(super) path: String,
    /// Whether the request is for the headers only.
    pub(super) head: bool,
}

/// A status code and its name.
pub(super) type Code = (u16, &'static str);

pub(super) const OK: Code = (200, "OK");
pub(super) const NOT_FOUND: Code = (404, "Not Found");
pub(super) const BUSY: Code = (503, "Service Unavailable");
const BAD: Code = (400, "Bad Request");
const WRONG_METHOD: Code = (405, "Method Not Allowed");
const TOO_SLOW: Code = (408, "Request Timeout");
const WRONG_HOST: Code = (421, "Misdirected Request");
const TOO_LONG: Code = (431, "Request Header Fields Too Large");

/// Reads a request. `names` are the host names, besides `localhost`, by which clients may reach this
/// process.
///
/// # Errors
/// The status code of the answer that refuses the request.
pub(super) fn read(connection: &mut dyn Connection, names: &[String]) -> Result<Request, Code> {
    let local = connection.local().map_err(|_| BAD)?;
    let deadline = Instant::now() + REQUEST_LIMIT;
    let mut bytes = Vec::new();
    let mut part = [0; 2048];
    for _ in 0..MAX_PARTS {
        let limit = remaining(deadline).map_err(|_| TOO_SLOW)?;
        connection.set_limit(limit).map_err(|_| BAD)?;
        let length = match connection.read(&mut part) {
            Ok(0) => return Err(BAD),
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(TOO_SLOW),
            Err(_) => return Err(BAD),
        };
        bytes.extend_from_slice(&part[..length]);
        // A request ends with a line break, so parse again only after another line break.
        if part[..length].contains(&b'\n')
            && let Some(request) = parse(&bytes, local, names)?
        {
            return Ok(request);
        }
        if bytes.len() > HEAD_LIMIT_BYTES {
            return Err(TOO_LONG);
        }
    }
    Err(BAD)
}

/// Parses a request; `None` if it is not complete.
fn parse(bytes: &[u8], local: IpAddr, names: &[String]) -> Result<Option<Request>, Code> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length > HEAD_LIMIT_BYTES => {
            return Err(TOO_LONG);
        }
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(TOO_LONG),
        Err(_) => return Err(BAD),
    }
    let head = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Err(WRONG_METHOD),
    };
    let values = |name: &str| {
        let of_name = request.headers.iter();
        let of_name = of_name.filter(|one| one.name.eq_ignore_ascii_case(name));
        of_name.map(|one| one.value).collect::<Vec<_>>()
    };
    let has_body = |length: &&[u8]| length.trim_ascii() != b"0";
    if values("content-length").iter().any(has_body) || !values("transfer-encoding").is_empty() {
        return Err(BAD);
    }
    let [host] = values("host")[..] else {
        return Err(BAD);
    };
    let host = std::str::from_utf8(host).map_err(|_| BAD)?;
    if !is_own_name(host.trim(), local, names) {
        return Err(WRONG_HOST);
    }
    let path = request.path.unwrap_or_default();
    let path = path.split('?').next().unwrap_or_default().to_owned();
    Ok(Some(Request { path, head }))
}

/// Whether the header `Host` of a request names this process. A page of another site can make its
/// own name resolve to this host (DNS rebinding), and could then read the answers like its own
/// files. The page cannot do that with an address, or with a name of this host.
fn is_own_name(host: &str, local: IpAddr, names: &[String]) -> bool {
    let has_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if has_port(port) => name,
        _ => host,
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    if let Ok(address) = bare.unwrap_or(name).parse::<IpAddr>() {
        let address = address.to_canonical();
        return address == local || address.is_loopback() && local.is_loopback();
    }
    let is = |own: &str| name.eq_ignore_ascii_case(own);
    is("localhost") && local.is_loopback() || names.iter().any(|own| is(own))
}

pub(super) struct Answer<'a> {
    pub(super) code: Code,
    pub(super) media_type: &'a str,
    pub(super) body: &'a [u8],
    /// The content security policy: what a browser may do with the answer.
    pub(super) policy: &'a str,
}

impl Answer<'_> {
    /// Writes the answer; without the body if `head`.
    ///
    /// # Errors
    /// The client is gone, or does not read in time.
    pub(super) fn write(&self, connection: &mut dyn Connection, head: bool) -> io::Result<()> {
        let (code, name) = self.code;
        let allow = match self.code {
            WRONG_METHOD => "Allow: GET, HEAD\r\n",
            _ => "",
        };
        let headers = format!(
            "HTTP/1.1 {code} {name}\r\n\
             Content-Type: {}\r\n\
             Content-Length: {}\r\n\
             Content-Security-Policy: {}\r\n\
             Cache-Control: no-store\r\n\
             Connection: close\r\n\
             Cross-Origin-Opener-Policy: same-origin\r\n\
             Cross-Origin-Resource-Policy: same-origin\r\n\
             Referrer-Policy: no-referrer\r\n\
             X-Content-Type-Options: nosniff\r\n\
             {allow}\r\n",
            self.media_type,
            self.body.len(),
            self.policy,
        );
        let deadline = Instant::now() + ANSWER_LIMIT;
        let body = if head { &[][..] } else { self.body };
        for part in [headers.as_bytes(), body] {
            let mut rest = part;
            while !rest.is_empty() {
                connection.set_limit(remaining(deadline)?)?;
                match connection.write(rest) {
                    Ok(length) => rest = &rest[length..],
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// The answer that refuses a request.
pub(super) fn refusal(code: Code) -> Answer<'static> {
    Answer {
        code,
        media_type: "text/plain; charset=utf-8",
        body: match code {
            WRONG_HOST => b"unknown host name: give it to dunlin serve-status with --host\n",
            _ => b"",
        },
        policy: "default-src 'none'",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_names_of_this_host_are_accepted() {
        let names = ["status.example".to_owned()];
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let public: IpAddr = "192.0.2.7".parse().unwrap();
        for (host, on_loopback, on_public) in [
            ("localhost", true, false),
            ("LOCALHOST:9", true, false),
            ("127.0.0.1:80", true, false),
            ("[::1]:80", true, false),
            ("192.0.2.7", false, true),
            ("[::ffff:192.0.2.7]:80", false, true),
            ("status.example:80", true, true),
            ("status.example.", false, false),
            ("evil.example", false, false),
            ("localhost.evil.example", false, false),
            ("127.0.0.1.evil.example", false, false),
            ("localhost:80@evil.example", false, false),
            ("192.0.2.8", false, false),
            ("", false, false),
            (":80", false, false),
        ] {
            assert_eq!(is_own_name(host, loopback, &names), on_loopback, "{host}");
            assert_eq!(is_own_name(host, public, &names), on_public, "{host}");
        }
    }

    #[test]
    fn i7_requests_are_bounded_and_have_no_body() {
        let local = "127.0.0.1".parse().unwrap();
        let parse =
            |text: &str| parse(text.as_bytes(), local, &[]).map(|one| one.map(|one| one.path));
        let get = "GET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\n";
        let whole = |more: &str| parse(&format!("{get}{more}\r\n"));
        assert_eq!(parse(get), Ok(None));
        assert_eq!(whole(""), Ok(Some("/metrics".to_owned())));
        assert_eq!(
            whole("Content-Length: 0\r\n"),
            Ok(Some("/metrics".to_owned()))
        );
        assert_eq!(whole("Content-Length: 1\r\n"), Err(BAD));
        assert_eq!(whole("Transfer-Encoding: chunked\r\n"), Err(BAD));
        assert_eq!(whole("Host: localhost\r\n"), Err(BAD));
        assert_eq!(whole(&"A: b\r\n".repeat(MAX_HEADERS)), Err(TOO_LONG));
        assert_eq!(
            whole(&format!("A: {}\r\n", "b".repeat(HEAD_LIMIT_BYTES))),
            Err(TOO_LONG)
        );
        assert_eq!(parse("GET / HTTP/1.1\r\n\r\n"), Err(BAD));
        assert_eq!(
            parse("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"),
            Err(WRONG_HOST)
        );
        assert_eq!(
            parse("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            Err(WRONG_METHOD)
        );
        assert_eq!(parse("\u{16}\u{3}\u{1}\r\n\r\n"), Err(BAD));
    }
}
