-- Both engines: what text of a record or an output can smuggle in is taken out; tables scroll; figures get the marks that a pointer shows.
-- Without Quarto also what Quarto does itself, as far as the book uses it: numbered figures and tables, references to them, boxes, folded code.

local is_html = FORMAT:match("html") ~= nil
local harmless = { br = true, sub = true, sup = true }

local function raw(element)
  if element.format ~= "html" or not harmless[element.text:match("^</?(%l+)/?>$")] then return {} end
end

local function calm(element)  -- no attribute is an event's script
  if not (element.attr and element.attributes) then return nil end
  local kept = {}
  for name, value in pairs(element.attributes) do
    if not name:lower():match("^on") then kept[#kept + 1] = { name, value } end
  end
  element.attr = pandoc.Attr(element.identifier, element.classes, kept)
  return element
end

local function local_path(target)
  return not target:match("^%a[%w+.-]*:") and not target:match("^[/\\]") and not target:match("%.%.")
end

local function link(element)
  local csv = element.classes:includes("csv")
  if not is_html and (csv or element.target:match("^runs/")) then return csv and {} or element.content end
  if not (element.target:match("^https?://") or element.target:match("^#") or local_path(element.target)) then return element.content end
end

-- The circles that lsai_lab/kit/marks.py put into the SVG lie over the picture as links: a pointer shows the title, a click opens the run.
local mark = '<circle cx="([%d.]+)" cy="([%d.]+)" r="5" fill="none" data%-run="([%w%._/-]*)"><title>([^<>"]*)</title>'

local function image(element)
  if not (element.src:match("^data:image/[psj][%w+]*;") or local_path(element.src)) then return pandoc.Emph("(picture left out)") end
  if not quarto then element.attributes.alt, element.attributes["fig-alt"] = element.attributes["fig-alt"], nil end
  local file = is_html and element.src:match("%.svg$") and io.open(element.src)
  if not file then return element end
  local svg, marks = file:read("a"), {}
  local width, height = svg:match('viewBox="0 0 ([%d.]+) ([%d.]+)"')
  for x, y, run, title in svg:gmatch(mark) do
    local left, href = x / width * 100, run == "" and "" or ' href="runs/' .. run .. '.html"'
    local format = '<a class="tip%s" tabindex="-1" style="left:%.1f%%;top:%.1f%%"%s data-tip="%s"></a>'
    marks[#marks + 1] = format:format(left > 50 and " left" or "", left, y / height * 100, href, title)
  end
  local over = '<span aria-hidden="true">' .. table.concat(marks) .. "</span>"
  return pandoc.Span({ element, pandoc.RawInline("html", #marks > 0 and over or "") }, { class = "marked" })
end

local function plain(block)  -- typst reads a cell that begins with "= 8" as a heading
  if block.content[1] and block.content[1].t == "Str" and block.content[1].text:match("^[=+-/]") then block.content:insert(1, pandoc.RawInline("typst", "#[]")) end
  return block
end

local function scrolling(element)
  for index, spec in ipairs(element.colspecs) do element.colspecs[index] = { spec[1], nil } end  -- as wide as the content
  if is_html then return pandoc.Div(element, pandoc.Attr("", { "table-box" }, { tabindex = "0", role = "region", ["aria-label"] = "table" })), false end
  return element:walk({ Plain = plain })
end

local words, labels, numbers, counters = { fig = "Figure", tbl = "Table", sec = "Section" }, {}, { 0, 0, 0, 0, 0, 0 }, {}

local function header(element)
  if element.level == 1 then counters = { fig = 0, tbl = 0 } end
  numbers[element.level] = numbers[element.level] + 1
  for level = element.level + 1, 6 do numbers[level] = 0 end
  labels[element.identifier] = (element.level == 1 and "Chapter" or "Section") .. "\u{a0}" .. table.concat(numbers, ".", 1, element.level)
end

local function float(div, kind)
  counters[kind] = (counters[kind] or 0) + 1
  labels[div.identifier] = words[kind] .. "\u{a0}" .. numbers[1] .. "." .. counters[kind]
  local content = div.content:clone()
  local caption = #content > 1 and content[#content].t:match("^P[al]") and content:remove().content or pandoc.Inlines({})
  caption = pandoc.Inlines({ pandoc.Strong(labels[div.identifier] .. "."), pandoc.Space() }) .. caption
  if kind == "tbl" and not is_html and content[1].t == "Table" then
    content[1].caption, content[1].attr = { long = { pandoc.Plain(caption) } }, pandoc.Attr(div.identifier)
    return content
  end
  return pandoc.Figure(content, { pandoc.Plain(caption) }, pandoc.Attr(div.identifier, { kind == "tbl" and "table" or "image" }))
end

local function div(element)
  local kind = element.identifier:match("^(%a+)%-")
  if kind == "fig" or kind == "tbl" then return float(element, kind), false end
  if not (element.classes[1] or ""):match("^callout") then return nil end
  element.content = element.content:map(function(block) return block.t == "Header" and pandoc.Para({ pandoc.Strong(block.content) }) or block end)
  if is_html then return element end
  return { pandoc.RawBlock("typst", "#block(breakable: false, stroke: (left: 2pt + gray), inset: 8pt)["), element, pandoc.RawBlock("typst", "]") }, false
end

local function cite(element)
  local out = pandoc.Inlines({})
  for index, citation in ipairs(element.citations) do
    if not words[citation.id:match("^(%a+)%-") or ""] then return nil end
    if index > 1 then out:extend({ pandoc.Str(","), pandoc.Space() }) end
    local name = labels[citation.id]
    out:insert(name and pandoc.Link(name, "#" .. citation.id) or pandoc.Emph(citation.id .. " (not measured here)"))
  end
  return out
end

local function code(element)
  if not element.classes:includes("python") then return nil end
  return is_html and { pandoc.RawBlock("html", '<details class="code"><summary>Code</summary>'), element, pandoc.RawBlock("html", "</details>") } or {}
end

function Pandoc(doc)
  doc = doc:walk({ Block = calm, Inline = calm })
  doc = doc:walk({ RawBlock = raw, RawInline = raw, Link = link, Table = not is_html and scrolling or nil }):walk({ Image = image })
  if not quarto then
    doc = doc:walk({ traverse = "topdown", Header = header, Div = div }):walk({ Cite = cite, CodeBlock = code })
    if not is_html then doc.blocks:insert(1, pandoc.RawBlock("typst", "#outline(title: [Figures], target: figure.where(kind: image))")) end
  end
  return is_html and doc:walk({ traverse = "topdown", Table = scrolling }) or doc
end
