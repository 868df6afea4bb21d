//! No bytes of guests or private keys appear in the command's output, with or without JSON, nor in
//! journals, status or errors. The test uses three kinds of secrets, called canaries: bytes that it
//! writes into a guest's memory, the secret number in a key file, and a line of the file's text. It
//! searches for parts of each canary in several encodings: raw, escaped, in base64, and as integers
//! of one to eight bytes in hexadecimal and decimal.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::KeyPair;
use support::process::exit_code;
use support::{Hosts, words};

const LIMIT: Duration = Duration::from_secs(60);

/// The test searches for every part of a canary that has this length in bytes.
const PART_BYTES: usize = 9;

const GUEST: &str = "--guest process --memory 64M --backing memfd --fill-size 4M --working-set 4M";

/// The test also searches for every part of this length in bytes, written as integers of two, four
/// or eight bytes. The length is a multiple of these sizes.
const WORDS_BYTES: usize = 8;

/// What may separate two integers: the formats of Rust's `Debug`, and what programs print.
const SEPARATORS: [&str; 8] = ["", ":", " ", ", ", ",", ", 0x", " 0x", ",\n    "];

/// A secret that must appear nowhere.
struct Canary {
    name: String,
    bytes: Vec<u8>,
}

impl Canary {
    /// The canary's parts in all encodings for which the test searches.
    fn needles(&self) -> Vec<Vec<u8>> {
        let mut needles = Vec::new();
        for part in self.bytes.windows(PART_BYTES) {
            needles.push(part.to_vec());
            needles.push(joined(part, "\\x", |byte| format!("{byte:02x}")));
            needles.push(part.escape_ascii().to_string().into_bytes());
            for separator in SEPARATORS {
                needles.push(joined(part, separator, |byte| format!("{byte:02x}")));
                needles.push(joined(part, separator, |byte| format!("{byte:02X}")));
                needles.push(joined(part, separator, u8::to_string));
            }
        }
        for part in self.bytes.windows(WORDS_BYTES) {
            for bytes in [2, 4, 8] {
                needles.extend(as_words(part, bytes));
            }
        }
        // Base64 encodes groups of three bytes, and a part can begin at any byte of a group, so
        // encode from three offsets. Twelve characters stand for nine bytes.
        for from in 0..3 {
            let text = base64(&self.bytes[from..]);
            needles.extend(text.windows(12).map(<[u8]>::to_vec));
            let url = |byte: &u8| match byte {
                b'+' => b'-',
                b'/' => b'_',
                other => *other,
            };
            needles.extend(text.windows(12).map(|part| part.iter().map(url).collect()));
        }
        needles.sort();
        needles.dedup();
        needles
    }

    fn search(&self) -> Search {
        // Index the needles by their first two bytes, because there are many needles.
        let mut starts = vec![Vec::new(); 1 << 16];
        for needle in self.needles() {
            starts[usize::from(needle[0]) << 8 | usize::from(needle[1])].push(needle);
        }
        Search(starts)
    }
}

/// The needles of a canary, by their first two bytes.
struct Search(Vec<Vec<Vec<u8>>>);

impl Search {
    /// Returns a needle that `text` contains.
    fn find(&self, text: &[u8]) -> Option<&[u8]> {
        (0..text.len().saturating_sub(1)).find_map(|at| {
            let start = usize::from(text[at]) << 8 | usize::from(text[at + 1]);
            let mut needles = self.0[start].iter();
            needles
                .find(|needle| text[at..].starts_with(needle))
                .map(Vec::as_slice)
        })
    }
}

/// The text of `part` as integers of `bytes` bytes, in both byte orders and all formats.
fn as_words(part: &[u8], bytes: usize) -> Vec<Vec<u8>> {
    let little = |word: &[u8]| {
        word.iter()
            .rev()
            .fold(0, |all, byte| all << 8 | u64::from(*byte))
    };
    let big = |word: &[u8]| word.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    let digits = 2 * bytes;
    let unused = 64 - 8 * bytes;
    let formats: [&dyn Fn(u64) -> String; 6] = [
        &|word| format!("{word:0digits$x}"),
        &|word| format!("{word:0digits$X}"),
        &|word| format!("{word:x}"),
        &|word| format!("{word:X}"),
        &|word| word.to_string(),
        &|word| ((word << unused).cast_signed() >> unused).to_string(),
    ];
    let mut texts = Vec::new();
    let in_order = [
        part.chunks(bytes).map(little).collect::<Vec<u64>>(),
        part.chunks(bytes).map(big).collect(),
    ];
    for words in in_order {
        for format in formats {
            for separator in SEPARATORS {
                let all: Vec<_> = words.iter().map(|word| format(*word)).collect();
                texts.push(all.join(separator).into_bytes());
            }
        }
    }
    texts
}

fn joined(bytes: &[u8], separator: &str, write: impl Fn(&u8) -> String) -> Vec<u8> {
    let parts: Vec<_> = bytes.iter().map(write).collect();
    parts.join(separator).into_bytes()
}

fn base64(bytes: &[u8]) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = bytes.chunks_exact(3).flat_map(|three| {
        let bits = u32::from(three[0]) << 16 | u32::from(three[1]) << 8 | u32::from(three[2]);
        [18, 12, 6, 0].map(|shift| ALPHABET[(bits >> shift & 63) as usize])
    });
    groups.collect()
}

/// Random letters. Unlike other bytes, they survive a conversion to UTF-8 text.
fn letters(count: usize) -> Vec<u8> {
    let letter = |byte: u8| b'a' + byte % 26;
    random(count).into_iter().map(letter).collect()
}

fn random(bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    File::open("/dev/urandom")
        .unwrap()
        .read_exact(&mut found)
        .unwrap();
    found
}

/// Two canaries of a key: the secret number in its file (RFC 5915: an octet string of 32 bytes
/// after the version), and a line of the file's text.
fn key_canaries(file: &Path) -> [Canary; 2] {
    let text = fs::read_to_string(file).unwrap();
    let content = KeyPair::from_pem(&text).unwrap().serialize_der();
    let mark = [2, 1, 1, 4, 32];
    let at = content
        .windows(5)
        .position(|window| window == mark)
        .unwrap()
        + mark.len();
    let canary = |what: &str, bytes: &[u8]| Canary {
        name: format!("{what} of {}", file.display()),
        bytes: bytes.into(),
    };
    [
        canary("the number", &content[at..at + 32]),
        // Use the second line of base64, because most of the first line is the same for every key.
        canary("the text", text.lines().nth(2).unwrap().as_bytes()),
    ]
}

/// A process that writes all its output to files. It is killed on drop.
struct Spoken {
    child: Child,
    out: PathBuf,
}

impl Spoken {
    fn start(mut command: Command, output: &Path, name: &str) -> Self {
        let file = |kind: &str| File::create(output.join(format!("{name}.{kind}"))).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .unwrap();
        Self {
            child,
            out: output.join(format!("{name}.out")),
        }
    }

    fn wait_for(&self, text: &str) -> String {
        let began = Instant::now();
        loop {
            let said = fs::read_to_string(&self.out).unwrap();
            if let Some(line) = said.lines().find(|line| line.contains(text)) {
                return line.to_owned();
            }
            assert!(began.elapsed() < LIMIT, "no {text:?} in {said}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn code(&mut self) -> i32 {
        exit_code(&mut self.child).unwrap_or(-1)
    }

    /// The process's memory, and the address in it at which the guest's memory begins. The guest's
    /// memory is a memfd.
    fn memory(&self) -> (File, u64) {
        let entry = format!("/proc/{}", self.child.id());
        let maps = fs::read_to_string(format!("{entry}/maps")).unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let start = maps.lines().find_map(|line| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let bytes = number(end) - number(start);
            (line.contains("memfd") && bytes >= 32 << 20).then(|| number(start))
        });
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("{entry}/mem"));
        (memory.unwrap(), start.unwrap())
    }
}

impl Drop for Spoken {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A test's hosts, and the directory of all output.
struct Scene {
    hosts: Hosts,
    output: PathBuf,
    said: u32,
}

impl Scene {
    fn new() -> Self {
        let hosts = Hosts::new();
        let output = hosts.scratch.join("output");
        fs::create_dir(&output).unwrap();
        Self {
            hosts,
            output,
            said: 0,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.hosts.scratch.join(name)
    }

    fn begin(&mut self, command: Command) -> Spoken {
        self.said += 1;
        Spoken::start(command, &self.output, &self.said.to_string())
    }

    /// Runs a command until it ends; returns its exit code.
    fn run(&mut self, command: Command) -> i32 {
        self.begin(command).code()
    }

    /// The command `line` with the scene's control directory `control`.
    fn with(&self, line: &str, control: &str) -> Command {
        let mut command = words(line);
        command.arg("--control").arg(self.at(control));
        command
    }

    fn owner(&mut self, line: &str, control: &str, identity: Option<&str>) -> Spoken {
        let mut command = self.with(line, control);
        command.arg("--state-dir").arg(self.at("state"));
        command.args(
            identity
                .iter()
                .flat_map(|name| ["--identity".into(), self.at(name).into_os_string()]),
        );
        self.begin(command)
    }

    fn migrate(&mut self, from: &str, to: &str, identity: &str, flags: &str) -> Spoken {
        let line = format!("vm migrate --name vm --to {to} {flags}");
        let mut command = self.with(&line, from);
        command.arg("--identity").arg(self.at(identity));
        self.begin(command)
    }

    /// Copies the journals to the output, because sessions remove their journals when they end.
    fn keep_journals(&mut self) {
        let mut kept = 0;
        for file in fs::read_dir(self.at("state")).unwrap() {
            let path = file.unwrap().path();
            self.said += 1;
            let copy = format!("{}.journal", self.said);
            kept += fs::copy(path, self.output.join(copy)).unwrap();
        }
        assert!(kept > 0, "there is no journal");
    }

    /// All output and every written file, except the identities.
    fn everything(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut found = Vec::new();
        for directory in ["output", "state", "one", "two"] {
            for file in fs::read_dir(self.at(directory)).unwrap() {
                let path = file.unwrap().path();
                // Skips sockets, which cannot be read.
                if let Ok(content) = fs::read(&path) {
                    found.push((path, content));
                }
            }
        }
        found
    }
}

/// The address in a line such as `listening on …`.
fn address(line: &str) -> String {
    let at = line.find("127.0.0.1:").unwrap();
    let digits = |c: &char| c.is_ascii_digit() || ".:".contains(*c);
    line[at..].chars().take_while(digits).collect()
}

fn moves(scene: &mut Scene, json: &str, pages: &[&[u8]]) {
    let source = scene.owner(&format!("vm run --name vm {GUEST} {json}"), "one", None);
    source.wait_for("control");
    let (memory, start) = source.memory();
    // Write each canary at the start of a page, at addresses above the guest's working set and the
    // filled part. The guest does not overwrite these pages.
    let places: Vec<_> = (24_u64 << 20..).step_by(4096).zip(pages).collect();
    for (place, canary) in &places {
        memory.write_all_at(canary, start + place).unwrap();
    }

    let receive = format!("vm receive --listen 127.0.0.1:0 --peer a.test {json}");
    let mut destination = scene.owner(&receive, "two", Some("b"));
    let to = address(&destination.wait_for("127.0.0.1:"));

    // Various failures, each of which leaves the VM at the source.
    let name = "--peer other.test";
    assert_eq!(
        scene
            .migrate("one", &to, "a", &format!("{name} {json}"))
            .code(),
        1
    );
    let b = format!("--peer b.test {json}");
    assert_eq!(scene.migrate("one", &to, "stranger", &b).code(), 1);
    assert_eq!(scene.migrate("one", &to, "broken", &b).code(), 1);
    assert_eq!(scene.migrate("one", &to, "mixed", &b).code(), 1);
    assert_eq!(scene.migrate("one", &to, "open", &b).code(), 1);
    assert_eq!(scene.migrate("one", "127.0.0.1:1", "a", &b).code(), 1);
    // Request plain lanes, which the destination does not allow.
    let plain = format!("{b} --security plain");
    assert_eq!(scene.migrate("one", &to, "a", &plain).code(), 1);
    // Send garbage to the destination's port, and an invalid request to the source's control
    // socket.
    TcpStream::connect(&to)
        .unwrap()
        .write_all(&[0x16; 900])
        .unwrap();
    let mut control = UnixStream::connect(scene.at("one/vm.sock")).unwrap();
    control.write_all(b"{\"do\":\"nothing\"}\n").unwrap();
    let mut answer = Vec::new();
    control.read_to_end(&mut answer).unwrap();
    fs::write(scene.output.join("answer"), answer).unwrap();
    // Start a migration, and cancel it while its journals are on disk.
    let slow = format!("{b} --rate 1M");
    let mut under_way = scene.migrate("one", &to, "a", &slow);
    under_way.wait_for("1");
    scene.keep_journals();
    let mut cancel = words(&format!("cancel {json} --vm"));
    cancel.arg(scene.at("one/vm.sock"));
    assert_eq!(scene.run(cancel), 0);
    assert_eq!(under_way.code(), 4);

    // The timeline contains what the process logs.
    let timeline = scene.output.join(format!("{}.timeline", scene.said));
    let verified = format!("{b} --verify --lanes 3 --timeline {}", timeline.display());
    assert_eq!(scene.migrate("one", &to, "a", &verified).code(), 0);
    destination.wait_for("two/vm.sock");
    let (memory, start) = destination.memory();
    for (place, canary) in &places {
        let mut arrived = vec![0; canary.len()];
        memory.read_exact_at(&mut arrived, start + place).unwrap();
        assert_eq!(&arrived, *canary, "the canary did not arrive");
    }

    assert_eq!(
        scene.run(scene.with(&format!("vm status --name vm {json}"), "two")),
        0
    );
    let mut status = words(&format!("status {json} --state-dir"));
    status.arg(scene.at("state"));
    assert_eq!(scene.run(status), 0);
    let mut show = words(&format!("pki show {json}"));
    show.arg(scene.at("a"));
    assert_eq!(scene.run(show), 0);
    assert_eq!(
        scene.run(scene.with("vm ask --name vm power-off", "two")),
        0
    );
    assert_eq!(destination.code(), 0);
}

/// Claim H4 of docs/security.
#[test]
fn i6_no_byte_of_a_guest_or_a_key_is_printed_or_written() {
    let mut scene = Scene::new();
    let hosts = &scene.hosts;
    hosts.authority("other");
    hosts.issue("other", "stranger", "a.test", 1);
    for name in ["broken", "mixed", "open"] {
        hosts.issue("ca", name, "a.test", 1);
    }
    // Three unusable keys: a malformed key, the key of another certificate, and a key that every
    // user can read.
    let key = |of: &str| scene.at(of).join("key.pem");
    let text = fs::read_to_string(key("broken")).unwrap();
    let mut canaries: Vec<_> = ["a", "b", "stranger", "broken", "open"]
        .into_iter()
        .flat_map(|name| key_canaries(&key(name)))
        .collect();
    fs::write(key("broken"), text.replace("-----END", "*-----END")).unwrap();
    fs::copy(key("a"), key("mixed")).unwrap();
    fs::set_permissions(key("open"), PermissionsExt::from_mode(0o644)).unwrap();
    let pages = [random(48), letters(48)];
    canaries.extend(pages.iter().map(|page| Canary {
        name: "the guest's memory".into(),
        bytes: page.clone(),
    }));

    let pages = pages.each_ref().map(Vec::as_slice);
    moves(&mut scene, "--json", &pages);
    moves(&mut scene, "", &pages);

    let everything = scene.everything();
    let bytes: usize = everything.iter().map(|(_, content)| content.len()).sum();
    println!("{} files of {bytes} bytes", everything.len());
    assert!(everything.len() > 40 && bytes > 10_000);
    for canary in &canaries {
        let search = canary.search();
        for (path, content) in &everything {
            let found = search.find(content);
            assert!(
                found.is_none(),
                "{} of {} is in {}",
                String::from_utf8_lossy(found.unwrap_or_default()),
                canary.name,
                path.display()
            );
        }
    }
}

/// Claim H4 of docs/security.
#[test]
fn a_canary_is_found_in_every_encoding() {
    let canary = Canary {
        name: String::new(),
        bytes: random(32),
    };
    let search = canary.search();
    let part = &canary.bytes[7..23];
    let upper = joined(part, "", |byte| format!("{byte:02X}"));
    let shorts: Vec<_> = part
        .chunks(2)
        .map(|two| u16::from_be_bytes(two.try_into().unwrap()))
        .collect();
    let ints: Vec<_> = part
        .chunks(4)
        .map(|four| i32::from_le_bytes(four.try_into().unwrap()))
        .collect();
    let long = u64::from_le_bytes(part[..8].try_into().unwrap());
    for written in [
        part.to_vec(),
        upper,
        format!("{part:?}").into_bytes(),
        format!("{part:02x?}").into_bytes(),
        format!("{part:#?}").into_bytes(),
        part.escape_ascii().to_string().into_bytes(),
        base64(part),
        [&b"xx"[..], &base64(&canary.bytes[1..])].concat(),
        format!("{shorts:?}").into_bytes(),
        format!("{ints:?}").into_bytes(),
        format!("{ints:02x?}").into_bytes(),
        format!("{ints:#?}").into_bytes(),
        format!("{long}").into_bytes(),
        format!("{long:#018x}").into_bytes(),
    ] {
        let text = [&b"before "[..], &written, b" after"].concat();
        assert!(search.find(&text).is_some(), "{text:?}");
    }
    assert!(search.find(&random(4096)).is_none());
}
