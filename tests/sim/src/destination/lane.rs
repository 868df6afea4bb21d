//! A lane's thread at the destination.

use dunlin_proto::lanes::CourseError;

use crate::network::{Packet, Side};
use crate::plan::MS;
use crate::world::{Event, World};

/// A lane's thread and its connection.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) connection: usize,
    does: Does,
    awake: bool,
}

#[derive(Debug)]
enum Does {
    Reads,
    Writes {
        number: u64,
        readings: u32,
        pages: Vec<(u32, u32)>,
        written: usize,
    },
    WaitsAtMark(u32),
    /// The thread has ended and must be joined.
    Ended,
}

impl Lane {
    pub(super) fn new(connection: usize) -> Self {
        Self {
            connection,
            does: Does::Reads,
            awake: false,
        }
    }
}

impl World<'_> {
    /// Wakes the thread that reads from this connection. Returns true if there is such a thread or
    /// the lane waits to be admitted.
    pub(crate) fn destination_lane_has_news(&mut self, connection: usize, number: u16) -> bool {
        let lane = self
            .destination
            .session
            .as_ref()
            .and_then(|s| s.lanes.get(&number));
        if lane.is_some_and(|lane| lane.connection == connection) {
            self.wake_receiver(number);
            return true;
        }
        // Frames after *lane open* wait until the lane is admitted.
        self.destination
            .arrivals
            .iter()
            .any(|(arrived, ..)| *arrived == connection)
    }

    pub(super) fn wake_receiver(&mut self, number: u16) {
        let session = self.session();
        let id = session.id;
        if let Some(lane) = session.lanes.get_mut(&number)
            && !std::mem::replace(&mut lane.awake, true)
        {
            self.soon(Event::DestinationLane {
                session: id,
                lane: number,
            });
        }
    }

    pub(super) fn wake_receivers(&mut self) {
        for number in self.session().lanes.keys().copied().collect::<Vec<_>>() {
            self.wake_receiver(number);
        }
    }

    /// Closes a lane's connection while the lane's thread uses it.
    pub(super) fn close_lane(&mut self, number: u16) {
        if let Some(lane) = self.session().lanes.get(&number) {
            let connection = lane.connection;
            self.close(connection, Side::Destination, true);
        }
        self.wake_receiver(number);
    }

    /// One step of a lane's thread.
    pub(crate) fn destination_lane(&mut self, id: u32, number: u16) {
        let Some(session) = self.destination.session.as_mut().filter(|s| s.id == id) else {
            return;
        };
        let Some(lane) = session.lanes.get_mut(&number) else {
            return;
        };
        lane.awake = false;
        let closing = session.receiving.is_closing(number);
        let result = match &lane.does {
            Does::Ended => Ok(()),
            Does::Reads => self.receiver_reads(number, closing),
            Does::Writes { .. } => self.receiver_writes(number, closing),
            Does::WaitsAtMark(_) if closing => {
                self.receiver_ends(number);
                Ok(())
            }
            Does::WaitsAtMark(iteration) => {
                if session.receiving.may_pass(*iteration) {
                    lane.does = Does::Reads;
                    self.wake_receiver(number);
                }
                Ok(())
            }
        };
        if let Err(error) = result {
            self.violate("accused", error.to_string());
        }
    }

    fn receiver_reads(&mut self, number: u16, closing: bool) -> Result<(), CourseError> {
        let now_ns = self.now_ns;
        let Some(lane) = self.session().lanes.get(&number) else {
            return Ok(());
        };
        let connection = lane.connection;
        // Data that arrived before the close can still be read.
        let ends = closing && self.random.chance(70);
        let packet = if ends {
            None
        } else {
            self.connections[connection].take(Side::Destination, now_ns)
        };
        let Some(packet) = packet else {
            if closing {
                self.receiver_ends(number);
            }
            return Ok(());
        };
        self.source_lane_has_room(connection, number);
        self.say(|| match &packet {
            Packet::Chunk {
                number: chunk,
                iteration,
                pages,
                ..
            } => format!(
                "destination: lane {number} reads chunk {chunk} of iteration {iteration}, {} pages",
                pages.len()
            ),
            other => format!("destination: lane {number} reads {other:?}"),
        });
        let receiving = &mut self.session().receiving;
        match packet {
            Packet::Chunk {
                number: chunk,
                iteration,
                readings,
                pages,
            } => {
                receiving.check_chunk(number, chunk, iteration)?;
                self.receiver_does(
                    number,
                    Does::Writes {
                        number: chunk,
                        readings,
                        pages,
                        written: 0,
                    },
                );
            }
            Packet::Mark(iteration) => {
                receiving.mark(number, iteration)?;
                self.receiver_does(number, Does::WaitsAtMark(iteration));
                self.report_soon();
                self.wake_receivers();
            }
            Packet::End(chunks) => {
                receiving.ended(number, chunks)?;
                self.report_soon();
                self.receiver_ends(number);
                self.wake_receivers();
            }
            _ => self.receiver_ends(number),
        }
        self.wake_receiver(number);
        Ok(())
    }

    fn receiver_does(&mut self, number: u16, does: Does) {
        if let Some(lane) = self.session().lanes.get_mut(&number) {
            lane.does = does;
        }
    }

    fn receiver_ends(&mut self, number: u16) {
        self.say(|| format!("destination: lane {number}'s thread ends"));
        self.receiver_does(number, Does::Ended);
        self.session().ended.push_back(number);
        self.destination_wakes(0);
    }

    /// Writes a third of a chunk's pages.
    fn receiver_writes(&mut self, number: u16, closing: bool) -> Result<(), CourseError> {
        if closing && self.random.chance(40) {
            // The rest of the chunk had not arrived when the lane was closed.
            self.receiver_ends(number);
            return Ok(());
        }
        let Some(lane) = self.session().lanes.get_mut(&number) else {
            return Ok(());
        };
        let Does::Writes {
            number: chunk,
            readings,
            pages,
            mut written,
        } = std::mem::replace(&mut lane.does, Does::Reads)
        else {
            return Ok(());
        };
        let part = pages.len().div_ceil(3);
        let end = (written + part).min(pages.len());
        for &(page, version) in &pages[written..end] {
            self.check_write(number, page, readings);
            if let Some(copy) = &mut self.session().copy {
                copy.writers[page as usize] = readings;
                copy.pages[page as usize] = version;
            }
        }
        written = end;
        if written == pages.len() {
            let pages = pages.len() as u64;
            self.session().receiving.written(number, chunk, pages)?;
            self.report_soon();
            self.wake_receiver(number);
        } else {
            self.receiver_does(
                number,
                Does::Writes {
                    number: chunk,
                    readings,
                    pages,
                    written,
                },
            );
            let id = self.session().id;
            if let Some(lane) = self.session().lanes.get_mut(&number) {
                lane.awake = true;
            }
            let after_ns = self.random.between(MS / 5, 3 * MS);
            self.at(
                self.now_ns + after_ns,
                Event::DestinationLane {
                    session: id,
                    lane: number,
                },
            );
        }
        Ok(())
    }
}
