//! `dunlin pki`: a small certificate authority for trials.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Subcommand, value_parser};
use dunlin::lane::identity::{
    AUTHORITIES_FILE, CERTIFICATE_FILE, Dated, Files, Identity, KEY_FILE, Layout, Role,
};
use dunlin::lane::peers::Peer;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use time::{Duration, OffsetDateTime};

use crate::control;
use crate::identity::{Reading, load_identity};
use crate::state::hex;

/// The authority's key, next to its certificate. It never leaves the directory.
const AUTHORITY_KEY_FILE: &str = "ca-key.pem";
/// The validity of a certificate starts this long before the time of issue. The clocks of two hosts
/// differ, and a new certificate must be valid on both hosts.
const BACKDATE: Duration = Duration::hours(1);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create an authority.
    Init {
        /// A new directory for the authority's certificate and key.
        directory: PathBuf,
        /// Days until the authority's certificate expires.
        #[arg(long, value_name = "N", default_value_t = 3650, value_parser = value_parser!(u32).range(1..))]
        days: u32,
        /// Print one JSON object that names the directory.
        #[arg(long)]
        json: bool,
    },
    /// Issue a host's certificate and key.
    Issue {
        /// The authority's directory.
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// A DNS name, IP address or URI of the host; repeatable.
        #[arg(long = "name", value_name = "NAME", required = true, value_parser = parse_name)]
        names: Vec<String>,
        /// Days until the host's certificate expires.
        #[arg(long, value_name = "N", default_value_t = 365, value_parser = value_parser!(u32).range(1..))]
        days: u32,
        /// A new directory for the host's certificate and key, to use with `--identity`.
        directory: PathBuf,
        /// Print one JSON object that names the directory.
        #[arg(long)]
        json: bool,
    },
    /// Show and check the content of an identity directory.
    Show {
        /// The directory, in the layout of Dunlin, QEMU, Cloud Hypervisor or libvirt.
        directory: PathBuf,
        #[command(flatten)]
        reading: Reading,
        /// Print one JSON object instead of text; two if each side of a migration has its own
        /// certificate.
        #[arg(long)]
        json: bool,
    },
}

pub(crate) fn run(command: &Command) -> Result<()> {
    let (directory, json) = match command {
        Command::Init {
            directory,
            days,
            json,
        } => {
            init(directory, *days)?;
            (directory, json)
        }
        Command::Issue {
            ca,
            names,
            days,
            directory,
            json,
        } => {
            issue(ca, names, *days, directory)?;
            (directory, json)
        }
        Command::Show {
            directory,
            reading,
            json,
        } => return show(directory, reading, *json),
    };
    // Without --json, success prints nothing.
    if *json {
        println!("{}", serde_json::json!({ "directory": directory }));
    }
    Ok(())
}

/// Parses a name that identifies a host to its peers.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    match text.parse::<Peer>() {
        Ok(Peer::Name(_)) => Ok(text.to_owned()),
        Ok(_) => Err("a pin cannot be a certificate's name".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Creates an authority in a new directory.
pub(crate) fn init(directory: &Path, days: u32) -> Result<()> {
    let mut params = CertificateParams::new(Vec::new())?;
    params
        .distinguished_name
        .push(DnType::CommonName, "Dunlin authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    validity(&mut params, days);
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    make_directory(directory)?;
    write(&directory.join(AUTHORITIES_FILE), &certificate.pem(), 0o644)?;
    let key_file = directory.join(AUTHORITY_KEY_FILE);
    write(&key_file, &key.serialize_pem(), 0o600)
}

/// Issues a host's identity into a new directory.
pub(crate) fn issue(ca: &Path, names: &[String], days: u32, directory: &Path) -> Result<()> {
    let authority = read(&ca.join(AUTHORITIES_FILE))?;
    let key = KeyPair::from_pem(&read(&ca.join(AUTHORITY_KEY_FILE))?)
        .with_context(|| format!("invalid authority key in {}", ca.display()))?;
    let issuer = Issuer::from_ca_cert_pem(&authority, key)
        .with_context(|| format!("invalid authority certificate in {}", ca.display()))?;
    let (uris, others): (Vec<_>, Vec<_>) = names.iter().cloned().partition(|n| n.contains("://"));
    let mut params =
        CertificateParams::new(others).context("a --name is not a DNS name, IP address or URI")?;
    for uri in uris {
        let uri = uri
            .try_into()
            .context("a URI of --name contains non-ASCII characters: percent-encode them")?;
        params.subject_alt_names.push(SanType::URI(uri));
    }
    params
        .distinguished_name
        .push(DnType::CommonName, names[0].clone());
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ClientAuth,
        ExtendedKeyUsagePurpose::ServerAuth,
    ];
    params.use_authority_key_identifier_extension = true;
    validity(&mut params, days);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    make_directory(directory)?;
    write(&directory.join(AUTHORITIES_FILE), &authority, 0o644)?;
    write(&directory.join(CERTIFICATE_FILE), &certificate.pem(), 0o644)?;
    write(&directory.join(KEY_FILE), &key.serialize_pem(), 0o600)
}

/// Shows the identity of each side; in Dunlin's layout both sides share one.
fn show(directory: &Path, reading: &Reading, json: bool) -> Result<()> {
    let layout = reading.layout(directory)?;
    let sides: &[(&str, Role)] = if layout == Layout::Dunlin {
        &[("both", Role::Source)]
    } else {
        &[("source", Role::Source), ("destination", Role::Destination)]
    };
    let mut shown = 0;
    for (side, role) in sides {
        let files = Files::in_directory(directory, Some(layout), Some(*role))?;
        // Skip a side without a certificate, because a host may be set up for only one side.
        if sides.len() > 1 && !files.certificate.exists() {
            continue;
        }
        let (identity, warnings) = load_identity(directory, *role, reading)?;
        show_one(side, layout, &identity, &warnings, json)?;
        shown += 1;
    }
    if shown == 0 {
        bail!(
            "{} has no certificate for either side of a migration: check the directory and \
             --identity-layout",
            directory.display()
        );
    }
    Ok(())
}

fn show_one(
    side: &str,
    layout: Layout,
    identity: &Identity,
    warnings: &[String],
    json: bool,
) -> Result<()> {
    let summary = identity.summary()?;
    let names: Vec<String> = summary.names.iter().map(ToString::to_string).collect();
    let fingerprint = hex(&summary.fingerprint);
    let key_pin = summary.key_pin.map(|pin| pin.to_string());
    if json {
        let dates: Vec<_> = identity.dates().iter().map(date).collect();
        println!(
            "{}",
            serde_json::json!({
                "side": side,
                "layout": layout.to_string(),
                "names": names,
                "sha256": fingerprint,
                "pin": summary.pin.to_string(),
                "key_pin": key_pin,
                "not_before": summary.not_before,
                "not_after": summary.not_after,
                "dates": dates,
                "authorities": summary.authorities,
                "revocation_lists": summary.revocation_lists,
                "denied_keys": summary.denied_keys,
                "warnings": warnings,
            })
        );
        return Ok(());
    }
    println!("for          {side} (layout {layout})");
    println!("names        {}", names.join(", "));
    println!("pin          {}", summary.pin);
    if let Some(key_pin) = key_pin {
        println!("key's pin    {key_pin}");
    }
    println!(
        "valid        {} to {}",
        summary.not_before, summary.not_after
    );
    println!("authorities  {}", summary.authorities);
    println!("CRLs         {}", summary.revocation_lists);
    println!("denied keys  {}", summary.denied_keys);
    for warning in warnings {
        println!("warning      {warning}");
    }
    println!("The key matches the certificate.");
    Ok(())
}

/// A validity period in seconds since 1970, and the days left.
fn date(dated: &Dated) -> serde_json::Value {
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
    let left = dated.not_after.duration_since(SystemTime::now()).ok();
    serde_json::json!({
        "item": dated.item.to_string(),
        "file": dated.path,
        "position": dated.position + 1,
        "not_before": seconds(dated.not_before),
        "not_after": seconds(dated.not_after),
        "days_left": left.map(|left| left.as_secs() / (24 * 60 * 60)),
    })
}

fn validity(params: &mut CertificateParams, days: u32) {
    let now = OffsetDateTime::now_utc();
    params.not_before = now - BACKDATE;
    params.not_after = now + Duration::days(i64::from(days));
}

pub(crate) fn make_directory(directory: &Path) -> Result<()> {
    if directory.exists() && fs::read_dir(directory)?.next().is_some() {
        bail!(
            "{} is not empty: nothing in it was changed; name a new directory",
            directory.display()
        );
    }
    // With this mode, whatever the umask is, no other user can replace the files.
    control::make_directory(directory, 0o755)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
