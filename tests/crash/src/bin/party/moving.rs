//! The VM of a run, which implements the traits that the engine calls.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use dunlin::engine::memory::MappedMemory;
use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, FaultCode, GuestMemory, Offered, Refusal, RunState, Section,
    SourceVm, VmDescription, VmmError,
};
use dunlin_crash_tests::files::Files;
use dunlin_crash_tests::guest::{Guest, HotPages, mapped};

use crate::stage::Stage;

/// Which process contains the VM at the source.
pub(crate) enum Home {
    /// This process.
    Here(Guest),
    /// Another process. It executes requests on its socket ([`Files::socket`]).
    Elsewhere(Files),
}

impl Home {
    fn ask(&self, line: &str) -> io::Result<String> {
        let answer = match self {
            Self::Here(guest) => guest.obey(line),
            Self::Elsewhere(files) => {
                let mut connection = UnixStream::connect(files.socket())?;
                writeln!(connection, "{line}")?;
                let mut answer = String::new();
                BufReader::new(connection).read_line(&mut answer)?;
                answer.trim_end().to_owned()
            }
        };
        match answer.strip_prefix("error ") {
            Some(error) => Err(io::Error::other(error.to_owned())),
            None => Ok(answer),
        }
    }

    fn order(&self, line: &str) -> Result<(), VmmError> {
        Ok(self.ask(line).map(drop)?)
    }
}

/// The VM at the source.
pub(crate) struct Leaving {
    home: Home,
    memory: Arc<MappedMemory<()>>,
    stage: Stage,
}

impl Leaving {
    pub(crate) fn new(home: Home, files: &Files, stage: &Stage) -> io::Result<Self> {
        Ok(Self {
            home,
            memory: Arc::new(mapped(files, "source")?),
            stage: stage.clone(),
        })
    }

    /// The VM's state, such as `running`.
    pub(crate) fn state(&self) -> io::Result<String> {
        self.home.ask("state")
    }
}

impl SourceVm for Leaving {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        Ok(VmDescription {
            uuid: [7; 16],
            name: "guest".into(),
            description: Vec::new(),
        })
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        vec![Box::new(HotPages)]
    }

    fn run_state(&self) -> RunState {
        match self.state().as_deref() {
            Ok("running") => RunState::Running,
            Ok("paused") => RunState::Paused,
            Ok(other) => RunState::Stopped(other.into()),
            Err(error) => RunState::Stopped(error.to_string()),
        }
    }

    fn pause(&self) -> Result<(), VmmError> {
        self.stage.at("pause");
        self.home.order("pause")
    }

    fn resume(&self) -> Result<(), VmmError> {
        self.home.order("resume")
    }

    fn throttle(&self, _percent: u8) -> Result<bool, VmmError> {
        Ok(false)
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        self.stage.at("save");
        Ok(Vec::new())
    }

    fn deactivate(&self) -> Result<(), VmmError> {
        self.stage.at("deactivate");
        self.home.order("deactivate")
    }

    fn reactivate(&self) -> Result<(), VmmError> {
        self.home.order("acquire")
    }

    fn hold(&self) -> Result<(), VmmError> {
        self.stage.at("hold");
        Ok(())
    }

    fn destroy(&self) {
        self.stage.at("destroy");
        if let Err(error) = self.home.order("destroy") {
            self.stage.say(&format!("not destroyed: {error}"));
        }
        self.stage.at("destroyed");
    }
}

/// The VM at the destination, which is in this process.
pub(crate) struct Arriving {
    guest: Guest,
    memory: Arc<MappedMemory<()>>,
    stage: Stage,
}

impl DestinationVm for Arriving {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn load(&self, _sections: &[Section]) -> Result<(), VmmError> {
        self.stage.at("load");
        Ok(())
    }

    fn acquire(&self) -> Result<(), VmmError> {
        self.stage.at("acquire");
        Ok(self.guest.acquire()?)
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        self.stage.at("resume");
        self.guest.resume()?;
        self.stage.at("resumed");
        Ok(None)
    }

    fn announce(&self) {}

    fn discard(&self) {
        self.guest.destroy();
    }
}

/// Builds the VM at the destination, and keeps a reference to it.
pub(crate) struct Arrivals {
    files: Files,
    stage: Stage,
    built: Option<Arc<Arriving>>,
}

impl Arrivals {
    pub(crate) fn new(files: &Files, stage: &Stage) -> Self {
        Self {
            files: files.clone(),
            stage: stage.clone(),
            built: None,
        }
    }

    /// The VM's state; `none` if no VM has been built.
    pub(crate) fn state(&self) -> &'static str {
        self.built.as_ref().map_or("none", |vm| vm.guest.state())
    }
}

impl Builder for Arrivals {
    fn build(&mut self, _offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        let built = || -> io::Result<Arriving> {
            Ok(Arriving {
                guest: Guest::new(&self.files, "destination")?,
                memory: Arc::new(mapped(&self.files, "destination")?),
                stage: self.stage.clone(),
            })
        };
        let vm = Arc::new(built().map_err(|error| Refusal {
            fault: FaultCode::Internal,
            text: error.to_string(),
        })?);
        self.built = Some(Arc::clone(&vm));
        Ok(vm)
    }
}
