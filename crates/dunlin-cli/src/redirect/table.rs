//! The nftables table with the rules of all redirects, as nft lists it, and comparisons of two such
//! lists.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::nft;
use super::rules::{CHAINS, COPY, MARK, TABLE, copied};

/// The table in force.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// The version of nft. Different versions list the same table differently.
    version: String,
    objects: Vec<Value>,
}

/// A table without the counters and handles, which change while the table is in force. nft lists
/// rules in another form than the one in which it reads them. So `apply` lists the table that it
/// has loaded and saves that list to a file, for later comparisons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    version: String,
    objects: Vec<Value>,
}

/// Packets that matched the rules of one redirect. The rules match the first packet of a
/// connection. A program that retries after a rejection is counted each time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counters {
    pub(super) redirected: u64,
    /// Connections of local users to the peers, rejected because the redirect does not list the
    /// user.
    pub(super) rejected_output: u64,
    /// Rejected connections that this host would have routed to the peers.
    pub(super) rejected_forward: u64,
    /// Rejected connections from the wire to ports of this host.
    pub(super) rejected_input: u64,
    /// Connections in the clear, for each address in `plain_from`.
    pub(super) plain: BTreeMap<String, u64>,
}

impl Table {
    /// The table in force; `None` if there is none.
    pub(super) fn live() -> Result<Option<Self>> {
        Ok(nft::list(TABLE)?.map(|json| Self::of(&json)))
    }

    /// The table that results from rules, as nft lists it. To obtain this table, the function loads
    /// a copy of the rules that filters no packet.
    pub(super) fn expected(text: &str) -> Result<Self> {
        nft::load(&copied(text))?;
        let copy = nft::list(COPY);
        nft::load(&format!("table {COPY}\ndelete table {COPY}\n"))?;
        let mut copy = copy?.unwrap_or_default();
        complete(&mut copy);
        Ok(Self::of(&copy))
    }

    fn of(json: &Value) -> Self {
        let mut objects = json["nftables"].as_array().cloned().unwrap_or_default();
        let mut version = String::new();
        objects.retain(|object| match object["metainfo"]["version"].as_str() {
            Some(found) => {
                version = found.to_owned();
                false
            }
            None => true,
        });
        Self { version, objects }
    }

    /// The digest of the rules that were applied.
    pub(super) fn digest(&self) -> Option<&str> {
        let mut comments = self.rules().filter_map(|rule| rule["comment"].as_str());
        comments.find_map(|comment| comment.strip_prefix(MARK))
    }

    /// The ports of the tunnel's listeners for redirected connections.
    pub(super) fn redirect_ports(&self) -> BTreeSet<u16> {
        let expressions = self.rules().filter_map(|rule| rule["expr"].as_array());
        let ports = expressions
            .flatten()
            .filter_map(|one| one["redirect"]["port"].as_u64());
        ports.filter_map(|port| u16::try_from(port).ok()).collect()
    }

    pub(super) fn record(&self) -> Record {
        let mut objects = self.objects.clone();
        objects.iter_mut().for_each(strip);
        Record {
            version: self.version.clone(),
            objects,
        }
    }

    /// The counters of each redirect.
    pub(super) fn counters(&self) -> BTreeMap<String, Counters> {
        let mut all: BTreeMap<String, Counters> = BTreeMap::new();
        for rule in self.rules() {
            let mut words = rule["comment"].as_str().unwrap_or_default().split(' ');
            let (Some(name), Some(what)) = (words.next(), words.next()) else {
                continue;
            };
            let expressions = rule["expr"].as_array().into_iter().flatten();
            let mut packets = expressions.filter_map(|one| one["counter"]["packets"].as_u64());
            let Some(packets) = packets.next() else {
                continue;
            };
            let counters = all.entry(name.to_owned()).or_default();
            match (what, rule["chain"].as_str()) {
                ("redirected", _) => counters.redirected += packets,
                ("rejected", Some("output")) => counters.rejected_output += packets,
                ("rejected", Some("forward")) => counters.rejected_forward += packets,
                ("rejected", Some("input")) => counters.rejected_input += packets,
                ("plain", _) => {
                    let address = words.next().unwrap_or_default().to_owned();
                    counters.plain.insert(address, packets);
                }
                _ => {}
            }
        }
        all
    }

    fn rules(&self) -> impl Iterator<Item = &Value> {
        let rules = self.objects.iter().map(|object| &object["rule"]);
        rules.filter(|rule| rule.is_object())
    }
}

impl Record {
    /// How `live` differs from this record; `None` if it does not.
    pub(super) fn difference(&self, live: &Self) -> Option<String> {
        if self == live {
            return None;
        }
        if self.version != live.version {
            return Some(format!(
                "nft was changed from version {} to {} since the last `dunlin redirect apply`",
                self.version, live.version
            ));
        }
        let missing = self.objects.iter().find(|one| !live.objects.contains(one));
        let added = live.objects.iter().find(|one| !self.objects.contains(one));
        Some(match (missing, added) {
            (Some(missing), _) => format!("{} is missing or was changed", named(missing)),
            (None, Some(added)) => format!("{} was added", named(added)),
            (None, None) => "the order of the rules was changed".to_owned(),
        })
    }
}

/// The name of a listed object, for messages.
fn named(object: &Value) -> String {
    let rule = &object["rule"];
    if let Some(chain) = rule["chain"].as_str() {
        return match rule["comment"].as_str() {
            Some(comment) => format!("rule \"{comment}\" of chain {chain}"),
            None => format!("a rule of chain {chain}"),
        };
    }
    match object["chain"]["name"].as_str() {
        Some(chain) => format!("chain {chain}"),
        None => "the table's description".to_owned(),
    }
}

/// Makes a listed copy comparable with the table in force. The copy has another name, and its
/// chains have no hooks; this function sets both as in the table in force.
fn complete(copy: &mut Value) {
    let (_, table) = TABLE.split_once(' ').unwrap_or_default();
    for object in copy["nftables"].as_array_mut().into_iter().flatten() {
        for (kind, key) in [("table", "name"), ("chain", "table"), ("rule", "table")] {
            if let Some(name) = object.get_mut(kind).and_then(|one| one.get_mut(key)) {
                *name = table.into();
            }
        }
        let chain = object.get_mut("chain");
        let named = |chain: &Value| CHAINS.into_iter().find(|one| chain["name"] == one.0);
        if let Some(chain) = chain
            && let Some((_, kind, hook, priority)) = named(chain)
        {
            chain["type"] = kind.into();
            chain["hook"] = hook.into();
            chain["prio"] = priority.into();
            chain["policy"] = "accept".into();
        }
    }
}

/// Removes handles and counters, and sorts sets.
fn strip(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.remove("handle");
            for (key, value) in map.iter_mut() {
                strip(value);
                match (&**key, value) {
                    ("counter", value) => *value = Value::Null,
                    ("set", Value::Array(set)) => set.sort_by_key(Value::to_string),
                    _ => {}
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(strip),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
